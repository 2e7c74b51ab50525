"""Assembling an engine: options that exceed the model or the memory, and the size of the pool."""

from types import SimpleNamespace

import pytest
import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.engine import assembly, pools
from paged_backend.loading import model_loader
from tests.support.in_process import tiny_assembly


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_model_len": 257}, "max_model_len=257: must be at most 256"),
        ({"max_model_len": 200, "num_gpu_blocks_override": 8}, "max_model_len=200: the KV cache holds only 32"),
        ({"num_gpu_blocks_override": 2 * 10**12}, r"num_gpu_blocks_override=2000000000000: a pool of .* GiB"),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 10**15},
            "kv_cache_memory_bytes=1000000000000000: a",
        ),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes=100: one block"),
    ],
)
def test_option_beyond_model_or_memory_is_rejected(tiny, options, reason, monkeypatch):
    """Before weights are read."""
    monkeypatch.setattr(model_loader, "load_weights", None)
    with pytest.raises(ConfigError, match=reason):
        tiny_assembly(tiny[0], **options)


def test_weights_beyond_the_memory_are_not_read(tiny, monkeypatch):
    monkeypatch.setattr(model_loader, "load_weights", None)
    monkeypatch.setattr(pools, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=r": the weights take .* GiB in torch\.float32; must fit into the"):
        tiny_assembly(tiny[0])


@pytest.mark.parametrize(
    ("device", "options", "tokens"),
    [
        ("cpu", {}, 1000),  # 0.1 s
        ("cuda", {}, 300),  # 2.5 times a decode step
        ("cuda", {"target_step_ms": 20}, 200),
        ("cuda", {"target_step_ms": 1e6}, 2048),
    ],
)
def test_prompt_tokens_beside_decode_follow_the_target_time_of_a_step(device, options, tokens):
    config = EngineConfig.from_options({"model": "x", "max_num_batched_tokens": 2048} | options)
    runner = SimpleNamespace(kv=SimpleNamespace(device=torch.device(device)))
    prepared = SimpleNamespace(runner=runner, costs=SimpleNamespace(token=1e-4), decode_seconds=0.012)
    assert assembly._prefill_budget(config, prepared).tokens == tokens


def test_pool_size_follows_byte_budget(tiny):
    assembly = tiny_assembly(tiny[0], num_gpu_blocks_override=None, kv_cache_memory_bytes=100_000)
    per_block = 3 * 2 * 2 * 16 * 4 * 4  # layers, keys and values, heads, elements, bytes, tokens
    assert assembly.scheduler.blocks.num_pages == 100_000 // per_block
    nbytes = assembly.runner.kv.memory.nbytes
    assert nbytes == assembly.scheduler.blocks.num_pages * per_block


def test_pool_size_follows_available_memory(tiny, monkeypatch):
    monkeypatch.setattr(pools, "available_memory", lambda: 2_000_000)
    small = tiny_assembly(tiny[0], num_gpu_blocks_override=None).scheduler.blocks.num_pages
    monkeypatch.setattr(pools, "available_memory", lambda: 4_000_000)
    large = tiny_assembly(tiny[0], num_gpu_blocks_override=None).scheduler.blocks.num_pages
    assert (small, large) == (1_000_000 // 3072, 2_000_000 // 3072)
    monkeypatch.setattr(pools, "CPU_POOL_LIMIT", pools.CPU_POOL_LIMIT >> 12)  # a pool of 4 GiB takes seconds
    monkeypatch.setattr(pools, "available_memory", lambda: 1 << 40)
    largest = tiny_assembly(tiny[0], num_gpu_blocks_override=None).scheduler.blocks.num_pages
    assert largest == (1 << 20) // 3072, "4 GiB is the most that is taken without being asked for"
