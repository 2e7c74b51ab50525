"""Builds the cache tiers behind the host pool, as the options ask for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.redis_address import RedisAddress
from paged_backend.api.secrets import read_key, read_secret
from paged_backend.api.sizes import GIB
from paged_backend.engine.model_preparation import PreparedModel
from paged_backend.execution.runner import StepRunner
from paged_backend.kv.stores.block_file import BlockSource
from paged_backend.kv.stores.chain import StoreChain
from paged_backend.kv.stores.disk import DiskStore
from paged_backend.kv.stores.remote import RedisClient, RemoteStore
from paged_backend.kv.stores.store import BlockStore


class RemoteAccess(NamedTuple):
    """Where the remote store is, and what is needed to use it."""

    address: RedisAddress
    password: str | None
    key: bytes | None  # for the authentication of values


def read_remote_access(config: EngineConfig) -> RemoteAccess | None:
    """Return how the remote store is reached; None without one. Raises ConfigError for an unusable password or key."""
    if config.remote_cache_url is None:
        return None
    address = RedisAddress.parse(config.remote_cache_url)
    password = read_secret("PAGED_REMOTE_CACHE_PASSWORD")
    if password and address.password:
        raise ConfigError("remote_cache_url: has a password, as PAGED_REMOTE_CACHE_PASSWORD has; leave one of them out")
    return RemoteAccess(address, password, read_key("PAGED_REMOTE_CACHE_SECRET"))


def build_stores(config: EngineConfig, prepared: PreparedModel, runner: StepRunner) -> StoreChain | None:
    """Return the tiers behind the host pool, or None if there are none."""
    if runner.host is None:
        return None
    loaded, layout = prepared.loaded, prepared.layout.blocks
    paths = [loaded.path, *([loaded.draft.path] if loaded.draft else [])]
    source = BlockSource(config, layout, paths, loaded.spec.dtype, loaded.spec.kv_dtype, prepared.runner.kv.device)
    blocks = [runner.host.read_block(range(kind.pages)) for kind in layout.kinds]
    tiers: list[BlockStore] = []
    shared = None
    if config.disk_cache_dir is not None:
        directory = Path(config.disk_cache_dir).expanduser()
        budget = _budget(config, "disk_cache_gib", blocks)
        tiers.append(DiskStore(directory, source.fingerprint, budget, blocks))
    if access := read_remote_access(config):
        shared = _remote_tier(config, access, source, blocks)
        tiers.append(shared)
    compute_seconds = prepared.costs.token * config.block_size
    max_seconds = compute_seconds if config.tier_read_mode == "auto" else math.inf
    return StoreChain(tiers, max_seconds, shared=shared) if tiers else None


def _budget(config: EngineConfig, option: str, blocks: list[list[torch.Tensor]]) -> int:
    """Return the bytes of a tier. Raises ConfigError if they hold no block."""
    wanted, block_bytes = getattr(config, option), sum(tensor.nbytes for block in blocks for tensor in block)
    if wanted * GIB < block_bytes:
        raise ConfigError(f"{option}={wanted:g}: one block takes {block_bytes} bytes; raise it")
    return int(wanted * GIB)


def _remote_tier(
    config: EngineConfig, access: RemoteAccess, source: BlockSource, blocks: list[list[torch.Tensor]]
) -> RemoteStore:
    """Return the tier of a Redis server. Raises ConfigError if its budget holds no block."""
    budget = _budget(config, "remote_cache_gib", blocks)
    return RemoteStore(
        RedisClient(access.address, access.password, config.remote_cache_timeout_ms / 1e3),
        source.fingerprint,
        blocks,
        budget=budget,
        ttl=config.remote_cache_ttl,
        secret=access.key,
    )
