"""The addresses of a packed batch in the block pool. The shapes are defined in kernels/README.md."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

Plan = TypeVar("Plan")


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Groups of decode rows whose block tables start with the same blocks, so that a GPU can read them once per group.

    An implementation may ignore them. Members must be decode rows with more context than shared tokens. All members of
    a group have the same leading blocks and the same number of tokens in them.
    """

    lens: Tensor  # [num_seqs] int32: tokens that each sequence shares with its group, in whole blocks; 0: in no group
    members: Tensor  # [num_seqs] int32: sequence indices, group after group; entries past the last group are never read
    group_starts: Tensor  # [num_groups + 1] int32: first index of each group in members; trailing groups may be empty
    max_len: int  # maximum of lens, known on the host

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
    """The addresses of one step's tokens: built once per step, and read by every layer. All tensors are on one device.

    Sequence s has the packed rows query_starts[s] to query_starts[s + 1] - 1. Rows past the last sequence are padding,
    and their attention output is unspecified. A sequence with context_lens[s] == 0 is padding too: its output is zero.
    """

    slots: Tensor  # [num_tokens] int64: block * block_size + offset of each new token; -1: write nothing
    block_tables: Tensor  # [num_seqs, max_blocks] int32: a GPU never reads entries past the context
    context_lens: Tensor  # [num_seqs] int32: tokens in the cache, including this step's
    query_starts: Tensor  # [num_seqs + 1] int32: packed row of each sequence's first query
    max_query_len: int  # known on the host, so that launch shapes need no device synchronization
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
    def plans(self) -> dict[Hashable, Any]:
        """The plans of the step; see `plan`."""
        return {}

    def plan(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """Return what `make` returned for the step's first layer with this key, or call it.

        An implementation of attention plans a step once for all layers with the same shapes. Each has its own keys.
        """
        if key not in self.plans:
            self.plans[key] = make()
        found: Plan = self.plans[key]
        return found


@dataclass(frozen=True, eq=False)
class PageAddresses:
    """The addresses of a step's tokens in another page of each block; see `Paging` for the tensors."""

    slots: Tensor  # [num_tokens] int64
    tables: Tensor  # [num_seqs, max_blocks] int32
