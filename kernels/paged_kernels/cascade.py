"""Groups of decode rows that share leading blocks, if reading those once is faster. Imports no torch.

B rows that share P tokens and have s further tokens each read B * (P + s) keys. If the prefix is read once for all, it
is P + B * s keys. The ratio is B * (P + s) / (P + B * s) at most: 8 for 64 rows of 2,048 + 256. A tile holds only
TILE_ROWS // group decode rows, and every tile reads the prefix: t tiles read t * P. The cost is one more launch, the
merge, and the partial results: a few microseconds, in which a GPU reads the keys of some thousand tokens of a layer.
Hence two conditions: at least MIN_SAVED_TOKENS are not read again, and the reads shrink by MIN_READ_RATIO.
"""

import itertools
from dataclasses import dataclass

import numpy as np

MIN_SHARED_TOKENS = 256  # minimum length of a prefix; groups are distinguished by the block of its last token
MIN_SAVED_TOKENS = 8192  # minimum tokens saved: at 4 KiB each (8 KV heads of 128, 16 bits), 8 us at 4.3 TB/s
MIN_READ_RATIO = 1.1
MAX_GROUPS = 16  # maximum groups, for which the grid always has programs
TILE_ROWS = 128


@dataclass(frozen=True)
class PrefixGroups:
    """`paged_kernels.paging.SharedPrefixes` in numpy. The shapes depend on the number of sequences only."""

    lens: np.ndarray  # [num_seqs] int32
    members: np.ndarray  # [num_seqs] int32
    group_starts: np.ndarray  # [MAX_GROUPS + 1] int32
    max_len: int  # maximum of lens


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
) -> PrefixGroups | None:
    """Find the groups of decode rows that share at least MIN_SHARED_TOKENS leading tokens; None if it saves too little.

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
    found = []
    for start, end in itertools.pairwise(bounds):
        if end - start > 1:
            rows = eligible[start:end]
            whole_blocks = (int(context_lens[rows].min()) - 1) // block_size
            shared = _leading_columns(block_tables, rows, whole_blocks) * block_size
            tiles = -(-len(rows) // max(1, TILE_ROWS // group))
            if shared >= MIN_SHARED_TOKENS:
                found.append(((len(rows) - tiles) * shared, shared, rows))
    found = sorted(found, key=lambda entry: -entry[0])[:MAX_GROUPS]
    saved = sum(entry[0] for entry in found)
    total = int(context_lens[decodes].sum())
    if saved < MIN_SAVED_TOKENS or total < MIN_READ_RATIO * (total - saved):
        return None
    return _pack(found, len(context_lens))


def _leading_columns(block_tables: np.ndarray, rows: np.ndarray, most: int) -> int:
    """Return how many of the first `most` columns are the same in all of these rows."""
    tables = block_tables[rows, :most]
    equal = (tables == tables[0]).all(axis=0)
    return most if equal.all() else int(equal.argmin())


def _pack(found: list[tuple[int, int, np.ndarray]], num_seqs: int) -> PrefixGroups:
    lens, members = np.zeros(num_seqs, np.int32), np.zeros(num_seqs, np.int32)
    group_starts = np.zeros(MAX_GROUPS + 1, np.int32)
    end = 0
    for index, (_, shared, rows) in enumerate(found):
        lens[rows] = shared
        start, end = end, end + len(rows)
        members[start:end] = rows
        group_starts[index + 1 :] = end
    return PrefixGroups(lens, members, group_starts, max(shared for _, shared, _ in found))
