"""How attention's work is cut up: tiles, warps and splits from what is static about a launch. Imports no triton.

Nothing is tuned while serving. `configs/<chip>.json` holds what was chosen for a chip; `default_tile` answers for
every shape that no table names.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).with_name("configs")

MIN_SPLIT = 256  # keys: a split of fewer would spend its time on starting and on being merged
MAX_SPLITS = 64  # of a sequence: what the merge reads at once
BALANCED = 16384  # keys: one sequence far longer than the others should not be one program's work
EFFICIENT = 0.9  # of the best share of busy multiprocessors: fewer splits that reach this are preferred
DEFAULT_MULTIPROCESSORS = 132  # where there is no device to ask: an H100's and an H200's


@dataclass(frozen=True)
class Tile:
    """One loop over keys."""

    block_m: int  # rows: queries times heads of a group
    block_n: int  # keys of a step
    num_warps: int
    num_stages: int  # steps whose keys are under way or in use


@dataclass(frozen=True)
class Facts:
    """What a tile is chosen by. A table is looked up by the fields in this order, `length` as a bucket."""

    kind: str  # "decode": a tile holds a sequence's queries, "prefill": it is filled by one long chunk
    block_d: int  # head_dim rounded up to a power of two, at least 16
    itemsize: int  # bytes of an element of the query
    rows: int  # of a tile that holds a sequence's queries ("prefill": one query); a power of two, at least 16
    quantized: bool
    length: int  # decode: of the longest context; prefill: of the longest chunk; tokens

    @property
    def key(self) -> tuple[Any, ...]:
        return self.kind, self.block_d, self.itemsize, self.rows, self.quantized


@dataclass(frozen=True)
class LaunchShape:
    """The constants of a compiled kernel, by the names it knows them by."""

    HEADS: int  # query heads of a group in one tile
    SMALL_M: int  # rows of a tile that holds all queries of a sequence
    SMALL_N: int
    SMALL_STAGES: int
    LARGE_M: int  # rows of a tile of a longer chunk; 0: no chunk is longer
    LARGE_N: int
    LARGE_STAGES: int
    num_warps: int


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def heads_of_a_tile(group: int, itemsize: int) -> int:
    return min(group, 16 if itemsize == 4 else 64)


def default_tile(chip: str, facts: Facts) -> Tile:
    """Compiles without spilling on every chip of `kernels.aot`, within the 99 KiB of shared memory that the smallest
    chips have.

    fp32 multiplies in registers, so its tiles stay small. Codes wait in registers on their way to a dot: a step takes
    fewer of them, or a loop fewer stages, than of keys as they are.
    """
    wide, hip = facts.block_d > 128, chip.startswith("gfx")
    if facts.itemsize == 4:
        block_n = 32 if facts.block_d <= 64 else 16
        return Tile(16, block_n, 8 if wide else 4, 1 if facts.quantized else 2)
    block_n = 32 if facts.quantized or wide else 64
    if facts.kind == "decode" and facts.rows <= 32:
        return Tile(facts.rows, block_n, 4, 2 if hip else 3)
    if hip:
        return Tile(64, 32, 4, 1)
    if wide:
        return Tile(64, block_n, 8, 1 if facts.quantized else 2)
    return Tile(64, block_n, 4 if facts.block_d <= 64 else 8, 2)


@dataclass(frozen=True)
class Table:
    """The tiles of one chip."""

    chip: str
    measured: str | None  # the machine and day that the figures come from; None: chosen by reading compiled code
    entries: dict[tuple[Any, ...], tuple[tuple[int, Tile], ...]]  # by Facts.key: (length up to which, tile), rising

    def find(self, facts: Facts) -> Tile | None:
        """Of the smallest bucket that holds the length, or of the largest."""
        buckets = self.entries.get(facts.key, ())
        return next((tile for length, tile in buckets if facts.length <= length), buckets[-1][1] if buckets else None)

    def rows(self) -> list[tuple[Facts, Tile]]:
        return [(Facts(*key, length), tile) for key, buckets in self.entries.items() for length, tile in buckets]


def table_of(chip: str, measured: str | None, rows: list[tuple[Facts, Tile]]) -> Table:
    """From facts and tiles in any order; the later of two with the same facts counts."""
    entries: dict[tuple[Any, ...], dict[int, Tile]] = {}
    for facts, tile in rows:
        entries.setdefault(facts.key, {})[facts.length] = tile
    return Table(chip, measured, {key: tuple(sorted(tiles.items())) for key, tiles in sorted(entries.items())})


def read_table(file: Path) -> Table:
    """Raises ValueError, naming the file, for what is not a table."""
    try:
        content = json.loads(file.read_text())
        rows = [(Facts(**entry["for"]), Tile(**entry["tile"])) for entry in content["entries"]]
        return table_of(content["chip"], content["measured"], rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: not a table of launch shapes ({error!r})") from error


def write_table(table: Table, file: Path) -> None:
    """One entry a line, so that a difference reads well."""
    lines = [json.dumps({"for": vars(facts), "tile": vars(tile)}) for facts, tile in table.rows()]
    head = f'{{"chip": {json.dumps(table.chip)}, "measured": {json.dumps(table.measured)}, "entries": ['
    file.write_text(head + "\n" + ",\n".join(lines) + "\n]}\n")


def nearest_chip(chip: str, known: list[str]) -> str | None:
    """The chip itself if it has a table; else the newest of the same maker that is older, or the oldest; else None.

    sm_120 and later have the matrix instructions and the shared memory of sm_86: they do as sm_80.
    """
    if chip in known:
        return chip
    if chip.startswith("sm_12") and "sm_80" in known:
        return "sm_80"
    maker = chip[:3]
    same = sorted((name for name in known if name.startswith(maker)), key=lambda name: (len(name), name))
    older = [name for name in same if (len(name), name) < (len(chip), chip)]
    return older[-1] if older else same[0] if same else None


_tables: dict[str, Table | None] = {}  # by chip; read once in a process


def table_for(chip: str) -> Table | None:
    """The table of the chip or of its nearest."""
    if chip not in _tables:
        found = nearest_chip(chip, [file.stem for file in CONFIGS.glob("*.json")])
        _tables[chip] = read_table(CONFIGS / f"{found}.json") if found else None
    return _tables[chip]


def use_table(table: Table) -> None:
    """From now on, in this process, instead of its chip's file."""
    _tables[table.chip] = table


def tile_for(chip: str, facts: Facts) -> Tile:
    """From the chip's table, or the default."""
    table = table_for(chip)
    return (table.find(facts) if table else None) or default_tile(chip, facts)


def _facts(kind: str, head_dim: int, itemsize: int, rows: int, quantized: bool, length: int) -> Facts:
    return Facts(kind, max(16, power_of_two(head_dim)), itemsize, rows, quantized, power_of_two(length))


def launch_shape(
    *,
    chip: str,
    head_dim: int,
    itemsize: int,
    group: int,
    quantized: bool,
    num_kv_heads: int,
    num_tokens: int,
    max_query_len: int,
    max_context_len: int,
    multiprocessors: int,
) -> LaunchShape:
    """Small tiles alone where one holds every query of a sequence; small and large ones otherwise.

    A decode row in a launch with large tiles keeps a small one: in a tile of 128 rows it would multiply 32 times what
    it needs. What it pays there is the registers and the shared memory of the large tile's program.
    """
    heads = heads_of_a_tile(group, itemsize)
    rows = max(16, power_of_two(heads))  # a tensor core wants 16
    one_tile = max_query_len * heads <= (16 if itemsize == 4 else 64)
    if one_tile:
        rows = max(rows, power_of_two(max_query_len * heads))

    def tile(kind: str, length: int) -> Tile:
        return tile_for(chip, _facts(kind, head_dim, itemsize, rows, quantized, length))

    small = tile("decode", max_context_len)
    if one_tile:
        return LaunchShape(heads, rows, small.block_n, small.num_stages, 0, 0, 0, small.num_warps)
    large = tile("prefill", max_query_len)
    block_m = max(rows, large.block_m)
    programs = (num_tokens * heads // block_m + 1) * num_kv_heads * -(-group // heads)
    if block_m > 64 >= rows and programs < multiprocessors:  # half the rows, and twice the programs
        large, block_m = tile("prefill", 1), 64
    return LaunchShape(
        heads, rows, small.block_n, small.num_stages, block_m, large.block_n, large.num_stages, large.num_warps
    )  # fmt: skip


def prefix_tile(*, chip: str, head_dim: int, itemsize: int, group: int, quantized: bool, num_seqs: int) -> Tile:
    """A prefill tile whose rows are the decode rows of many sequences; of 64 rows where those hold them all."""
    heads = heads_of_a_tile(group, itemsize)
    rows = max(16, power_of_two(heads))
    length = 4096 if num_seqs * heads > 64 else 1  # tokens of a chunk that fills as many rows, or one tile of 64
    tile = tile_for(chip, _facts("prefill", head_dim, itemsize, rows, quantized, length))
    smaller = max(rows, min(tile.block_m, power_of_two(num_seqs * heads)))
    return replace(tile, block_m=max(smaller, 64 if tile.block_m >= 64 else 16))


def count_splits(programs: int, max_len: int, multiprocessors: int) -> int:
    """Into how many parts a launch cuts each sequence's keys at most; a program cuts by its own length on the device.

    programs: those of the launch with one split each. max_len: of the longest sequence, taken up to a power of two, so
    that it is the same for steps that are alike, and for all of a captured graph.

    With s splits the busiest multiprocessor gets ceil(programs * s / multiprocessors) parts of 1/s: the share of the
    machine that works is programs * s / multiprocessors over that. 136 programs on 132 multiprocessors are 0.52 with
    one split, 0.88 with six. The fewest splits are taken that come within a tenth of the best.
    """
    most = min(MAX_SPLITS, power_of_two(max_len) // MIN_SPLIT)
    if most <= 1 or programs <= 0:
        return 1

    def busy(splits: int) -> float:
        work = programs * splits
        return work / (multiprocessors * -(-work // multiprocessors))

    # More than eight programs for each multiprocessor balance themselves; more splits would only add empty ones.
    balanced = min(most, -(-power_of_two(max_len) // BALANCED), max(1, 8 * multiprocessors // programs))
    enough = EFFICIENT * max(busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if splits >= balanced and busy(splits) >= enough)
