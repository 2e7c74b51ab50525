"""How the kernels' work is cut up: tiles, warps and splits from what is static about a launch. Imports no triton.

Nothing is tuned while serving. `configs/<chip>.json` holds what was chosen for a chip; `default_tile` and
`default_piece` answer for every shape that no table names.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

CONFIGS = Path(__file__).with_name("configs")

MIN_SPLIT = 256  # keys: a split of fewer would spend its time on starting and on being merged
MAX_SPLITS = 64  # of a sequence: what the merge reads at once
BALANCED = 16384  # keys: one sequence far longer than the others should not be one program's work
EFFICIENT = 0.9  # of the best share of busy multiprocessors: fewer splits that reach this are preferred
DEFAULT_MULTIPROCESSORS = 132  # where there is no device to ask: an H100's and an H200's
ROW_BUCKETS = (4, 64, 4096)  # up to how many of them pieces may differ; of more they are as of the last


@dataclass(frozen=True)
class Device:
    """What a launch is cut up for."""

    chip: str  # as the tables are named: "sm_90", "gfx942"
    multiprocessors: int


@cache
def device_of(device: torch.device) -> Device:
    """Of a GPU; in the interpreter an H100's."""
    if device.type != "cuda":
        return Device("sm_90", DEFAULT_MULTIPROCESSORS)
    found = torch.cuda.get_device_properties(device)
    hip = getattr(found, "gcnArchName", "") if torch.version.hip else ""
    return Device(hip.split(":")[0] or f"sm_{found.major}{found.minor}", found.multi_processor_count)


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, and its arguments and options by name; to launch, and to compile ahead of time."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> Any:
        """What it was compiled to; None in the interpreter."""
        return self.kernel[self.grid](**self.arguments)


@dataclass(frozen=True)
class Tile:
    """One loop over keys."""

    block_m: int  # rows: queries times heads of a group
    block_n: int  # keys of a step
    num_warps: int
    num_stages: int  # steps whose keys are under way or in use


@dataclass(frozen=True)
class TuningKey:
    """What a tile is chosen by. A table is looked up by the fields in this order, the last as a bucket."""

    kind: str  # "decode": a tile holds a sequence's queries, "prefill": it is filled by one long chunk
    block_d: int  # head_dim rounded up to a power of two, at least 16
    itemsize: int  # bytes of an element of the query
    rows: int  # of a tile that holds a sequence's queries ("prefill": one query); a power of two, at least 16
    quantized: bool
    length: int  # decode: of the longest context; prefill: of the longest chunk; tokens


@dataclass(frozen=True)
class RowTile:
    """What one program takes at a time, of a kernel that cuts all of its rows alike."""

    elements: int  # of one row; heads are taken whole, and at least one; block_copy: bytes
    num_warps: int


@dataclass(frozen=True)
class RowTuningKey:
    """What a piece is chosen by; looked up like `Facts`."""

    kind: str  # a name of PIECES
    width: int  # elements of a row up to a power of two (of padded heads, where it has heads); block_copy: bytes
    rows: int  # one of ROWS; of ANY_ROWS the last


DEFAULT_ROW_TILES = {  # where no table says otherwise; of one row at the most
    "kv_write": RowTile(2048, 4),
    "rope_kv_write": RowTile(2048, 4),
    "norm_rope_kv_write": RowTile(2048, 4),  # with an RMSNorm of each head
    "add_rms_norm": RowTile(2**30, 16),  # always a whole row
    "swiglu": RowTile(1024, 4),
    "sampling": RowTile(4096, 8),  # of the pass over all logits
    "block_copy": RowTile(16384, 8),
}
# Warps decide in which order a row is summed: the same for any number of rows, or what is beside a row would change its
# bits. For block_copy one is enough: a copy of few blocks is many pieces already.
ROW_COUNT_INVARIANT = ("norm_rope_kv_write", "add_rms_norm", "block_copy")


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


def heads_per_tile(group: int, itemsize: int) -> int:
    return min(group, 16 if itemsize == 4 else 64)


def default_tile(chip: str, facts: TuningKey) -> Tile:
    """Compiles without spilling on every chip of `paged_kernels.aot`, within the 99 KiB of shared memory that the
    smallest chips have.

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
    if wide and facts.quantized:  # of 32 codes some would spill on sm_90
        return Tile(64, 16 if chip == "sm_90" else block_n, 8, 1)
    if wide:
        return Tile(64, block_n, 8, 2)
    return Tile(64, block_n, 4 if facts.block_d <= 64 else 8, 2)


def default_row_tile(facts: RowTuningKey) -> RowTile:
    most = DEFAULT_ROW_TILES[facts.kind]
    warps = min(most.num_warps, max(1, facts.width // 512)) if facts.kind == "add_rms_norm" else most.num_warps
    return RowTile(min(most.elements, facts.width), warps)


Entry = tuple[TuningKey, Tile] | tuple[RowTuningKey, RowTile]


@dataclass(frozen=True)
class Table:
    """The tiles and pieces of one chip."""

    chip: str
    measured: str | None  # the machine and day that the figures come from; None: chosen by reading compiled code
    entries: dict[tuple[Any, ...], tuple[tuple[int, Any], ...]]  # by facts but the last: (up to which, tile), rising

    def find(self, facts: Any) -> Any:
        """Of the smallest bucket that holds the facts' last field, or of the largest; None without one."""
        key, bucket = _split(facts)
        buckets = self.entries.get(key, ())
        return next((tile for most, tile in buckets if bucket <= most), buckets[-1][1] if buckets else None)

    def rows(self) -> list[Entry]:
        """In the order of the file."""
        flat = [((*key, most), tile) for key, buckets in self.entries.items() for most, tile in buckets]
        return [((RowTuningKey if isinstance(tile, RowTile) else TuningKey)(*fields), tile) for fields, tile in flat]


def _split(facts: TuningKey | RowTuningKey) -> tuple[tuple[Any, ...], int]:
    *key, bucket = vars(facts).values()
    return tuple(key), bucket


def make_table(chip: str, measured: str | None, rows: Sequence[Entry]) -> Table:
    """From facts and tiles in any order; the later of two with the same facts counts."""
    entries: dict[tuple[Any, ...], dict[int, Any]] = {}
    for facts, tile in rows:
        key, bucket = _split(facts)
        entries.setdefault(key, {})[bucket] = tile
    return Table(chip, measured, {key: tuple(sorted(tiles.items())) for key, tiles in sorted(entries.items())})


def _powers(least: int, most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(least.bit_length() - 1, most.bit_length()))


LIMITS: dict[type, dict[str, tuple[Any, ...]]] = {  # what a field of a table may be
    TuningKey: {
        "kind": ("decode", "prefill"), "block_d": _powers(16, 256), "itemsize": (2, 4), "rows": _powers(16, 64),
        "quantized": (False, True), "length": _powers(1, 2**30),
    },
    Tile: {
        "block_m": _powers(16, 128), "block_n": _powers(16, 128), "num_warps": _powers(1, 16),
        "num_stages": tuple(range(1, 9)),
    },
    RowTuningKey: {"kind": tuple(DEFAULT_ROW_TILES), "width": _powers(1, 2**20), "rows": ROW_BUCKETS},
    RowTile: {"elements": _powers(1, 2**20), "num_warps": _powers(1, 16)},
}  # fmt: skip


def _checked(made: type, fields: dict[str, Any], **narrower: tuple[Any, ...]) -> Any:
    """An object of these fields. Raises ValueError for one that is missing, unknown or out of range."""
    limits = LIMITS[made] | narrower
    _only(fields, tuple(limits))
    for name, value in {**dict.fromkeys(limits), **fields}.items():
        allowed = limits[name]
        if type(value) is not type(allowed[0]) or value not in allowed:
            raise ValueError(f"{name}={value!r}: must be one of {allowed}")
    return made(**fields)


def _only(fields: dict[str, Any], known: tuple[str, ...]) -> None:
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"{name}={value!r}: must be one of the fields {known}")


def read_entry(entry: dict[str, Any]) -> Entry:
    """Of a table, or of the tuner's journal. Raises ValueError, naming field and value."""
    kind, kinds = entry["for"].get("kind"), (*LIMITS[TuningKey]["kind"], *DEFAULT_ROW_TILES)
    if kind not in kinds:
        raise ValueError(f"kind={kind!r}: must be one of {kinds}")
    if kind not in DEFAULT_ROW_TILES:
        facts = _checked(TuningKey, entry["for"])
        rows = tuple(m for m in LIMITS[Tile]["block_m"] if m >= facts.rows)
        return facts, _checked(Tile, entry["tile"], block_m=rows)
    facts = _checked(RowTuningKey, entry["for"], **({"rows": ROW_BUCKETS[-1:]} if kind in ROW_COUNT_INVARIANT else {}))
    least = {"add_rms_norm": facts.width, "block_copy": min(4, facts.width)}.get(kind, 1)  # a whole row; a whole word
    within = _powers(least, facts.width)
    return facts, _checked(RowTile, entry["tile"], elements=within)


def read_table(file: Path) -> Table:
    """Raises ValueError for what is not a table, naming the file, and the field and its value where it is one of
    theirs."""
    try:
        content = json.loads(file.read_text())
        _only(content, ("chip", "measured", "entries"))
        if content["chip"] != file.stem:
            raise ValueError(f"chip={content['chip']!r}: must be {file.stem!r}, as the file's name")
        if not isinstance(content["measured"], str | None):
            raise ValueError(f"measured={content['measured']!r}: must be a text, or null")
        entries = content["entries"]
        for entry in entries:
            _only(entry, ("for", "tile"))
        return make_table(content["chip"], content["measured"], [read_entry(entry) for entry in entries])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
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


def find_table(chip: str) -> Table | None:
    """The table of the chip or of its nearest."""
    if chip not in _tables:
        found = nearest_chip(chip, [file.stem for file in CONFIGS.glob("*.json")])
        _tables[chip] = read_table(CONFIGS / f"{found}.json") if found else None
    return _tables[chip]


def use_table(table: Table) -> None:
    """From now on, in this process, instead of its chip's file."""
    _tables[table.chip] = table
    _row_tile.cache_clear()


def find_tile(chip: str, facts: TuningKey | RowTuningKey) -> Any:
    """From the chip's table, or the default: a `Piece` for `RowFacts`."""
    table = find_table(chip)
    found = table.find(facts) if table else None
    return found or (default_row_tile(facts) if isinstance(facts, RowTuningKey) else default_tile(chip, facts))


def row_tile(device: Device, kind: str, *, width: int, rows: int) -> RowTile:
    """Of a launch over `rows` rows of `width` elements (block_copy: bytes, and any number of rows)."""
    few, some, many = ROW_BUCKETS
    bucket = many if kind in ROW_COUNT_INVARIANT or rows > some else some if rows > few else few
    return _row_tile(device.chip, kind, width, bucket)


@cache
def _row_tile(chip: str, kind: str, width: int, rows: int) -> RowTile:
    found: RowTile = find_tile(chip, RowTuningKey(kind, power_of_two(width), rows))
    return found


def _facts(kind: str, head_dim: int, itemsize: int, rows: int, quantized: bool, length: int) -> TuningKey:
    return TuningKey(kind, max(16, power_of_two(head_dim)), itemsize, rows, quantized, power_of_two(length))


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
    heads = heads_per_tile(group, itemsize)
    rows = max(16, power_of_two(heads))  # a tensor core wants 16
    one_tile = max_query_len * heads <= (16 if itemsize == 4 else 64)
    if one_tile:
        rows = max(rows, power_of_two(max_query_len * heads))

    def tile(kind: str, length: int) -> Tile:
        return find_tile(chip, _facts(kind, head_dim, itemsize, rows, quantized, length))

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
    heads = heads_per_tile(group, itemsize)
    rows = max(16, power_of_two(heads))
    length = 4096 if num_seqs * heads > 64 else 1  # tokens of a chunk that fills as many rows, or one tile of 64
    tile = find_tile(chip, _facts("prefill", head_dim, itemsize, rows, quantized, length))
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
