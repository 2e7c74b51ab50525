"""The addresses of a step's tokens in the block pool, and the prefixes that its decode rows share. Imports no triton.

The shapes are defined in kernels/README.md.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

MIN_SHARED_TOKENS = 256  # minimum length of a prefix; groups are distinguished by the block of its last token
MIN_SAVED_TOKENS = 8192  # minimum tokens saved: at 4 KiB each (8 KV heads of 128, 16 bits), 8 us at 4.3 TB/s
MIN_READ_RATIO = 1.1
MAX_GROUPS = 16  # maximum groups, for which the grid always has programs
TILE_ROWS = 128

Plan_co = TypeVar("Plan_co", covariant=True)


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


class PlanKey(Protocol[Plan_co]):
    """The properties of a layer from which attention is planned. Layers with equal keys share one plan of a step."""

    def plan(self, paging: "Paging") -> Plan_co:
        """Return the plan of a step."""


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
    packed: "Paging | None" = None  # of the blocks in four bits, for layers that have them (`packed_blocks`)

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
    def plans(self) -> dict[PlanKey[Any], Any]:
        """The plans that were made for the step; see `plan`."""
        return {}

    def plan(self, key: PlanKey[Plan_co]) -> Plan_co:
        """Return the plan of the step for layers with this key. It is made once, for the first of them."""
        if key not in self.plans:
            self.plans[key] = key.plan(self)
        plan: Plan_co = self.plans[key]
        return plan


# --- shared prefixes --------------------------------------------------------------------------------------------------
#
# B rows that share P tokens and have s further tokens each read B * (P + s) keys. If the prefix is read once for all,
# they read P + B * s keys. The ratio is B * (P + s) / (P + B * s) at most: 8 for 64 rows of 2,048 + 256. A tile holds
# only TILE_ROWS // group decode rows, and every tile reads the prefix: t tiles read t * P. The cost is one more launch,
# the merge, and the partial results: a few microseconds, in which a GPU reads the keys of some thousand tokens of a
# layer. Hence two conditions: at least MIN_SAVED_TOKENS are not read again, and the reads shrink by MIN_READ_RATIO.


def read_ratio(rows: int, shared: int, own: int) -> float:
    """Return the maximum factor by which fewer keys are read if `rows` sequences share `shared` of their tokens."""
    return rows * (shared + own) / (shared + rows * own)


def find_prefix_groups(
    block_tables: np.ndarray,  # [num_seqs, max_blocks] integers
    context_lens: np.ndarray,  # [num_seqs]: tokens, including this step's
    query_lens: np.ndarray,  # [num_seqs]
    *,
    block_size: int,
    group: int,  # query heads per KV head
) -> SharedPrefixes | None:
    """Find the groups of decode rows that share at least MIN_SHARED_TOKENS leading tokens; None if it saves too little.

    The result is on the host, and its shapes depend on the number of sequences only.

    Rows with the same block in the column of token MIN_SHARED_TOKENS - 1 form a group if all blocks before it are the
    same too. A group shares the whole blocks that all of its members have in common, but never a member's newest
    token. If there are more than MAX_GROUPS, the ones that save most are kept. The cost is num_seqs * (shared columns)
    table entries.
    """
    column = -(-MIN_SHARED_TOKENS // block_size) - 1
    decodes = query_lens == 1
    eligible = (decodes & (context_lens > (column + 1) * block_size)).nonzero()[0]
    if len(eligible) < 2 or column >= block_tables.shape[1]:
        return None
    key = block_tables[eligible, column]
    order = key.argsort()
    key = key[order]
    changes = (key[1:] != key[:-1]).nonzero()[0]
    if len(changes) == len(key) - 1:
        return None
    eligible = eligible[order]
    bounds = [0, *(changes + 1).tolist(), len(key)]
    groups = []
    for start, end in itertools.pairwise(bounds):
        if end - start > 1:
            rows = eligible[start:end]
            whole_blocks = (int(context_lens[rows].min()) - 1) // block_size
            shared = _leading_columns(block_tables, rows, whole_blocks) * block_size
            tiles = -(-len(rows) // max(1, TILE_ROWS // group))
            if shared >= MIN_SHARED_TOKENS:
                groups.append(((len(rows) - tiles) * shared, shared, rows))
    groups = sorted(groups, key=lambda entry: -entry[0])[:MAX_GROUPS]
    saved = sum(entry[0] for entry in groups)
    total = int(context_lens[decodes].sum())
    if saved < MIN_SAVED_TOKENS or total < MIN_READ_RATIO * (total - saved):
        return None
    return _pack(groups, len(context_lens))


def _leading_columns(block_tables: np.ndarray, rows: np.ndarray, most: int) -> int:
    """Return how many of the first `most` columns are the same in all of these rows."""
    tables = block_tables[rows, :most]
    equal = (tables == tables[0]).all(axis=0)
    return most if equal.all() else int(equal.argmin())


def _pack(groups: list[tuple[int, int, np.ndarray]], num_seqs: int) -> SharedPrefixes:
    lens, members = np.zeros(num_seqs, np.int32), np.zeros(num_seqs, np.int32)
    group_starts = np.zeros(MAX_GROUPS + 1, np.int32)
    end = 0
    for index, (_, shared, rows) in enumerate(groups):
        lens[rows] = shared
        start, end = end, end + len(rows)
        members[start:end] = rows
        group_starts[index + 1 :] = end
    max_len = max(shared for _, shared, _ in groups)
    return SharedPrefixes(torch.from_numpy(lens), torch.from_numpy(members), torch.from_numpy(group_starts), max_len)
