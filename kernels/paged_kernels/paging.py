"""Where a packed batch of chunks lives in the block pool. The glossary of shapes is in README.md."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Groups of decode rows whose block tables begin alike: a GPU reads those blocks once for many rows of a group.

    An implementation may ignore it. It must name decode rows only, whose shared tokens are fewer than their context;
    the members of a group have the same first blocks, and the same number of tokens in them.
    """

    lens: Tensor  # [num_seqs] int32: tokens of each sequence that its group shares, whole blocks; 0: in no group
    members: Tensor  # [num_seqs] int32: sequences, group after group; entries past the last group are never read
    group_starts: Tensor  # [num_groups + 1] int32: a group's first place in members; groups at the end may be empty
    max_len: int  # host integer, of lens

    def __post_init__(self) -> None:
        for tensor in (self.lens, self.members, self.group_starts):
            assert tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous()
        assert self.lens.shape == self.members.shape
        assert self.num_groups >= 1

    @property
    def num_groups(self) -> int:
        return self.group_starts.shape[0] - 1


@dataclass(frozen=True, eq=False)
class Paging:
    """Addresses of one step's tokens; built once per step, read by every layer. All tensors on one device.

    Sequence s owns the packed rows query_starts[s] to query_starts[s + 1] - 1. Rows past the last one are
    padding, and what attention returns for them is unspecified. A sequence with context_lens[s] == 0 is
    padding as well: it attends to nothing and gets zeros.
    """

    slots: Tensor  # [num_tokens] int64: block * block_size + offset of each new token; -1 = write nothing
    block_tables: Tensor  # [num_seqs, max_blocks] int32: entries past the context are never read on a GPU
    context_lens: Tensor  # [num_seqs] int32: tokens in the cache, this chunk included
    query_starts: Tensor  # [num_seqs + 1] int32: packed row of each sequence's first query
    max_query_len: int  # host integers, so that a launch shape is chosen without a device sync
    max_context_len: int
    shared: SharedPrefixes | None = None

    def __post_init__(self) -> None:
        assert self.slots.dtype == torch.int64
        assert self.slots.dim() == 1
        assert self.block_tables.dtype == torch.int32
        assert self.block_tables.dim() == 2
        assert self.context_lens.dtype == torch.int32
        assert self.context_lens.shape == (self.num_seqs,)
        assert self.query_starts.dtype == torch.int32
        assert self.query_starts.shape == (self.num_seqs + 1,)
        assert self.block_tables.stride(1) == 1 or self.block_tables.shape[1] <= 1
        assert self.context_lens.is_contiguous()
        assert self.query_starts.is_contiguous()
        assert self.shared is None or self.shared.lens.shape == (self.num_seqs,)

    @property
    def num_seqs(self) -> int:
        return self.block_tables.shape[0]

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What an implementation derives once per step and reuses over the layers, under keys of its own."""
        return {}
