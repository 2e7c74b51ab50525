"""Block managers, and sequences that compute with them, without a scheduler."""

from __future__ import annotations

from collections.abc import Iterable

from paged_backend.api.block_layout import FULL, BlockLayout, LayerKind
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.sequence import Sequence
from paged_backend.scheduling.group import Group
from tests.support.scheduler_stress import request


def manager(
    num_pages: int, block_size: int = 4, kinds: tuple[LayerKind, ...] = (FULL,), *, host=0, caching=True, **options
) -> BlockManager:
    layout = BlockLayout(block_size, kinds, max_pending=64)
    return BlockManager(num_pages, layout, caching=caching, num_host_pages=host, **options)


def sequence(blocks: BlockManager, tokens: Iterable[int], *, key=0, salt="") -> Sequence:
    return Group(request(key, tokens, cache_salt=salt), num_kinds=len(blocks.layout.kinds)).leader


def compute(blocks: BlockManager, one: Sequence) -> bool:
    """Compute the tokens of a sequence in one step, with the transfers that are planned. False without room."""
    if blocks.extend(one, len(one.tokens)) is None:
        return False
    transfers = blocks.ledger.take()
    one.computed = len(one.tokens)
    blocks.ledger.finish(transfers)
    blocks.commit(one, one.computed)
    return True


def cached(blocks: BlockManager, tokens: Iterable[int], **options) -> Sequence:
    """Return a sequence that has computed these tokens."""
    one = sequence(blocks, tokens, **options)
    assert compute(blocks, one)
    return one
