"""Tile shapes for each kernel: the table of a chip, read from `configs/<chip>.json`, and defaults for everything else.

Nothing is tuned while serving: `paged_kernels.tune` writes the tables. A shape that no entry covers gets
`default_tile` or `default_row_tile`. This module does not import triton.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HOPPER = "sm_90"  # the chip whose tiles may have a producer
CONFIGS = Path(__file__).with_name("configs")
ROW_BUCKETS = (4, 64, 4096)  # upper bounds of the row-count buckets; larger counts use the last bucket


class Tile(NamedTuple):
    """The tile shape of one loop over keys in an attention kernel."""

    block_m: int  # rows: queries times query heads of a group
    block_n: int  # keys per loop step
    num_warps: int
    num_stages: int  # loop steps whose keys are loaded or used at the same time
    producer: bool = False  # whether a warp of its own copies keys and values (`hopper_attention`)


class TuningKey(NamedTuple):
    """The properties of an attention launch that select the `Tile` of its chunks.

    A table is looked up by the fields in this order. The last one is a bucket: the smallest that is large enough.
    """

    block_d: int  # head_dim rounded up to a power of two, at least 16
    itemsize: int  # bytes per element of the query
    rows: int  # rows that one query takes: the query heads of a group; a power of two, at least 16
    quantized: bool
    length: int  # tokens of the longest chunk

    @property
    def can_have_producer(self) -> bool:
        """Whether the tile may have a producer, on Hopper."""
        return self.itemsize == 2 and not self.quantized and self.block_d in PRODUCER_TILES


class RowTile(NamedTuple):
    """The part of a row that one program of a row-wise kernel processes."""

    elements: int  # elements of one row, in whole heads if it has any; block_copy: bytes
    num_warps: int


class RowTuningKey(NamedTuple):
    """The properties of a row-wise launch that select its `RowTile`; looked up like a `TuningKey`."""

    kind: str  # a key of DEFAULT_ROW_TILES
    width: int  # elements of a row, with heads padded, rounded up to a power of two; block_copy: bytes of a block
    rows: int  # one of ROW_BUCKETS; for a kind of ROW_COUNT_INVARIANT always the last


AnyKey = TuningKey | RowTuningKey
AnyTile = Tile | RowTile  # a Tile for a TuningKey, a RowTile for a RowTuningKey

DEFAULT_ROW_TILES = {  # defaults if a table has no entry; clipped to one row
    "kv_write": RowTile(2048, 4),
    "rope_kv_write": RowTile(2048, 4),
    "norm_rope_kv_write": RowTile(2048, 4),  # rope_kv_write with an RMSNorm of each head
    "add_rms_norm": RowTile(2**30, 16),  # elements: always a whole row
    "swiglu": RowTile(1024, 4),
    "sampling": RowTile(4096, 8),  # of batches without filters
    "block_copy": RowTile(16384, 8),
}
# Kinds with one entry for any number of rows. The number of warps sets the order in which a row is summed: with an
# entry per row count, the bits of a row would depend on the rest of the batch. A block_copy of few blocks already has
# many tiles.
ROW_COUNT_INVARIANT = ("norm_rope_kv_write", "add_rms_norm", "block_copy")


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


# --- defaults ---------------------------------------------------------------------------------------------------------


def decode_tile(chip: str, *, block_d: int, itemsize: int, rows: int, quantized: bool) -> Tile:
    """Return the tile of a loop over the keys of a sequence, all of whose queries are in one tile of `rows` rows.

    It is in no table: the loop waits for memory, and on an H100 the best ten tiles differ by 0.1%. It compiles without
    spilling, and fits into shared memory, as `default_tile` does.
    """
    if itemsize == 4 or rows > 32 or block_d > 256:
        return default_tile(chip, TuningKey(block_d, itemsize, rows, quantized, 1))._replace(block_m=rows)
    stages = 2 if chip.startswith("gfx") else 4 if quantized and block_d <= 128 and rows == 16 else 3
    return Tile(rows, _default_block_n(block_d, quantized), 4, stages)


def _default_block_n(block_d: int, quantized: bool) -> int:
    return 32 if quantized or block_d > 128 else 64


def default_tile(chip: str, key: TuningKey) -> Tile:
    """Return a tile for chunks that compiles without spilling on every chip of `paged_kernels.aot`.

    It fits into 99 KiB of shared memory, which the smallest chips have. fp32 is multiplied in registers, so its tiles
    stay small. Quantized keys and values are widened in registers on their way to a dot product, so their loops take
    fewer keys per step, or have fewer stages.
    """
    wide, hip = key.block_d > 128, chip.startswith("gfx")
    if key.block_d > 256:  # latent attention: a step of 16 keys of 576 elements takes 18 KiB in 16 bits
        return Tile(16, 16, 4, 1 if hip or key.itemsize == 4 or key.quantized else 2)
    if key.itemsize == 4:
        block_n = 32 if key.block_d <= 64 else 16
        return Tile(16, block_n, 8 if wide else 4, 1 if key.quantized else 2)
    block_n = _default_block_n(key.block_d, key.quantized)
    if hip:
        return Tile(64, 32, 4, 1)
    if wide and key.quantized:  # 32 quantized keys per step would spill on sm_90
        return Tile(64, 16 if chip == "sm_90" else block_n, 8, 1)
    if wide:
        return Tile(64, block_n, 8, 2)
    return Tile(64, block_n, 4 if key.block_d <= 64 else 8, 2)


MAX_STAGED = 224 << 10  # bytes of shared memory on Hopper for queries, keys and values
# Tiles with a producer, by block_d, where PAGED_GPU_FEATURES asks for them.
PRODUCER_TILES = {64: Tile(128, 128, 4, 4, True), 128: Tile(128, 128, 4, 2, True), 256: Tile(128, 64, 4, 2, True)}


def default_row_tile(key: RowTuningKey) -> RowTile:
    """Return the tile of DEFAULT_ROW_TILES for the key's kind, clipped to one row."""
    tile = DEFAULT_ROW_TILES[key.kind]
    warps = min(tile.num_warps, max(1, key.width // 512)) if key.kind == "add_rms_norm" else tile.num_warps
    return RowTile(min(tile.elements, key.width), warps)


# --- tables and their files -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Where and when the entries of a table were timed."""

    gpu: str  # its name: "NVIDIA H100 80GB HBM3"
    software: str  # versions of torch and triton
    date: str  # as YYYY-MM-DD

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name}={value!r}: must be a text that is not empty")
        date.fromisoformat(self.date)


@dataclass(frozen=True)
class Table:
    """The tile shapes of one chip."""

    chip: str
    tiles: Mapping[AnyKey, AnyTile]
    measured: Measurement | None = None  # None: all entries were chosen by reading compiled code
    times: Mapping[AnyKey, float] = field(default_factory=dict)  # microseconds of a call, for timed entries

    __hash__ = object.__hash__  # for the cache of the tiles that were chosen

    def find(self, key: AnyKey, *, producer: bool = False) -> AnyTile | None:
        """Return the tile of the smallest bucket that holds the key's last field, or else of the largest bucket.

        None if the table has no entry for the key. producer: whether the tile may have a producer.
        """
        buckets = sorted(
            other
            for other, tile in self.tiles.items()
            if len(other) == len(key) and other[:-1] == key[:-1] and (producer or not getattr(tile, "producer", False))
        )
        nearest = next((bucket for bucket in buckets if bucket[-1] >= key[-1]), buckets[-1] if buckets else None)
        return None if nearest is None else self.tiles[nearest]


def _powers(least: int, most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(least.bit_length() - 1, most.bit_length()))


ALLOWED: dict[type, dict[str, tuple[Any, ...]]] = {  # allowed values of each field in a file
    TuningKey: {
        "block_d": _powers(16, 256), "itemsize": (2, 4), "rows": _powers(16, 64), "quantized": (False, True),
        "length": _powers(1, 2**30),
    },
    Tile: {
        "block_m": _powers(16, 128), "block_n": _powers(16, 128), "num_warps": _powers(1, 16),
        "num_stages": tuple(range(1, 9)), "producer": (False, True),
    },
    RowTuningKey: {"kind": tuple(DEFAULT_ROW_TILES), "width": _powers(1, 2**20), "rows": ROW_BUCKETS},
    RowTile: {"elements": _powers(1, 2**20), "num_warps": _powers(1, 16)},
}  # fmt: skip


def _parse(cls: type, fields: dict[str, Any], **narrower: tuple[Any, ...]) -> Any:
    """Build an object of `cls`. Raises ValueError for a field that is missing, unknown or out of range."""
    limits = ALLOWED[cls] | narrower
    _check_names(fields, *limits)
    for name, allowed in limits.items():
        value = fields.get(name)
        if type(value) is not type(allowed[0]) or value not in allowed:
            raise ValueError(f"{name}={value!r}: must be one of {allowed}")
    return cls(**fields)


def _check_names(fields: dict[str, Any], *known: str) -> None:
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"{name}={value!r}: must be one of the fields {known}")


def _parse_entry(fields: dict[str, Any], tile: dict[str, Any]) -> tuple[AnyKey, AnyTile]:
    if "kind" not in fields:
        key = _parse(TuningKey, fields)
        block_ms = tuple(m for m in ALLOWED[Tile]["block_m"] if m >= key.rows)
        if tile.get("producer"):
            return key, _parse_producer(key, tile)
        return key, _parse(Tile, {"producer": False, **tile}, block_m=block_ms)
    kind = fields["kind"]
    if kind not in tuple(DEFAULT_ROW_TILES):
        raise ValueError(f"kind={kind!r}: must be one of {tuple(DEFAULT_ROW_TILES)}, or absent for attention")
    row = _parse(RowTuningKey, fields, rows=ROW_BUCKETS[-1:] if kind in ROW_COUNT_INVARIANT else ROW_BUCKETS)
    least = {"add_rms_norm": row.width, "block_copy": min(4, row.width)}.get(kind, 1)  # minimum elements
    return row, _parse(RowTile, tile, elements=_powers(least, row.width))


def _parse_producer(key: TuningKey, fields: dict[str, Any]) -> Tile:
    """Build a tile with a producer. `hopper_attention` has 128 rows, and 4 warps before the others start."""
    may = (True,) if key.can_have_producer else (False,)
    tile: Tile = _parse(Tile, fields, block_m=(128,), block_n=(64, 128), num_warps=(4,), producer=may)
    if staged_bytes(key.block_d, tile) > MAX_STAGED:
        raise ValueError(f"num_stages={tile.num_stages}: must be less, so that a tile takes {MAX_STAGED} bytes at most")
    return tile


def staged_bytes(block_d: int, tile: Tile) -> int:
    """Return the shared memory that a tile with a producer takes for queries, keys and values of 16 bits."""
    return 2 * block_d * (tile.block_m + 2 * tile.num_stages * tile.block_n)


def read_table(file: Path) -> Table:
    """Read a table. Raises ValueError that names the file and, for an invalid field, the field and its value."""
    try:
        content = json.loads(file.read_text())
        _check_names(content, "chip", "measured", "entries")
        if content["chip"] != file.stem:
            raise ValueError(f"chip={content['chip']!r}: must be {file.stem!r}, as the file's name")
        measured, tiles, times = None, {}, {}
        if content["measured"] is not None:
            _check_names(content["measured"], "gpu", "software", "date")
            measured = Measurement(**content["measured"])
        for entry in content["entries"]:
            _check_names(entry, "for", "tile", "us")
            key, tile = _parse_entry(entry["for"], entry["tile"])
            if isinstance(tile, Tile) and tile.producer and content["chip"] != HOPPER:
                raise ValueError(f"producer=True: must be absent for {content['chip']}")
            tiles[key] = tile
            if "us" in entry:
                times[key] = _parse_time(entry["us"], measured)
        return Table(content["chip"], tiles, measured, times)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: not a table of launch shapes ({error!r})") from error


def _parse_time(us: Any, measured: Measurement | None) -> float:
    if measured is None:
        raise ValueError(f"us={us!r}: must be absent where measured is null")
    if type(us) not in (int, float) or not 0 < us < float("inf"):
        raise ValueError(f"us={us!r}: must be a positive number")
    return float(us)


def write_table(table: Table, file: Path) -> None:
    """Write a table with one entry per line, so that diffs are easy to read. Replaces the file in one step."""
    lines = []
    for key in sorted(table.tiles, key=lambda key: (isinstance(key, RowTuningKey), *key)):
        time = {"us": table.times[key]} if key in table.times else {}
        lines.append(json.dumps({"for": key._asdict(), "tile": table.tiles[key]._asdict(), **time}))
    measured = json.dumps(table.measured and vars(table.measured))
    head = f'{{"chip": {json.dumps(table.chip)}, "measured": {measured}, "entries": ['
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(head + "\n" + ",\n".join(lines) + "\n]}\n")
    os.replace(unfinished, file)


# --- lookup -----------------------------------------------------------------------------------------------------------

_tables: dict[str, Table | None] = {}  # tables by chip; each file is read once per process


def nearest_chip(chip: str, known: list[str]) -> str | None:
    """Return the chip whose table to use: itself, else the newest older one of the same vendor, else the oldest.

    Returns None if no chip of the vendor is known. sm_120 and later have the matrix instructions and the shared memory
    of sm_86, so they use the table of sm_80.
    """
    if chip in known:
        return chip
    if chip.startswith("sm_12") and "sm_80" in known:
        return "sm_80"
    vendor = chip[:3]
    same = sorted((name for name in known if name.startswith(vendor)), key=lambda name: (len(name), name))
    older = [name for name in same if (len(name), name) < (len(chip), chip)]
    return older[-1] if older else same[0] if same else None


def find_table(chip: str) -> Table | None:
    """Return the table of the chip or of its nearest one; None if there is none."""
    if chip not in _tables:
        nearest = nearest_chip(chip, [file.stem for file in CONFIGS.glob("*.json")])
        _tables[chip] = read_table(CONFIGS / f"{nearest}.json") if nearest else None
    return _tables[chip]


def use_table(table: Table) -> None:
    """Use this table in place of its chip's file for the rest of the process."""
    _tables[table.chip] = table


def find_tile(chip: str, key: TuningKey, *, producer: bool = False) -> Tile:
    """Return the tile from the chip's table, or the default. producer: whether the tile may have a producer."""
    table = find_table(chip)
    tile = table.find(key, producer=producer) if table else None
    return tile if isinstance(tile, Tile) else default_tile(chip, key)


def row_tile(chip: str, kind: str, *, width: int, rows: int) -> RowTile:
    """Return the tile of a launch over `rows` rows of `width` elements, from the chip's table or the default.

    For block_copy, `width` is the bytes of a block; the number of rows does not matter.
    """
    few, some, many = ROW_BUCKETS
    bucket = many if kind in ROW_COUNT_INVARIANT or rows > some else some if rows > few else few
    return _row_tile(find_table(chip), kind, width, bucket)


@cache
def _row_tile(table: Table | None, kind: str, width: int, rows: int) -> RowTile:
    key = RowTuningKey(kind, power_of_two(width), rows)
    tile = table.find(key) if table else None
    return tile if isinstance(tile, RowTile) else default_row_tile(key)
