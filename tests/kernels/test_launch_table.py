"""Tables of tile shapes: their files, the lookup, and what must not depend on them."""

import json
import os
import re
from dataclasses import replace

import pytest
import torch

from paged_kernels import launch_table, tuning_inputs
from paged_kernels.launch import Device
from paged_kernels.launch_table import (
    CONFIGS,
    DEFAULT_ROW_TILES,
    ROW_BUCKETS,
    ROW_COUNT_INVARIANT,
    Measurement,
    RowTile,
    RowTuningKey,
    Table,
    Tile,
    TuningKey,
    default_row_tile,
    default_tile,
    nearest_chip,
)
from paged_kernels.tuning_inputs import make_problem

CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")
MEASURED = Measurement("A GPU 80GB", "torch 2, triton 3", "2026-11-22")


def test_every_compiled_chip_has_a_table_with_its_origin():
    assert sorted(file.stem for file in CONFIGS.glob("*.json")) == sorted(CHIPS)
    for chip in CHIPS:
        table = launch_table.read_table(CONFIGS / f"{chip}.json")
        assert table.chip == chip
        assert table.tiles
        assert "measured" in json.loads((CONFIGS / f"{chip}.json").read_text())
        for key, tile in table.tiles.items():
            others = Table(chip, {other: table.tiles[other] for other in table.tiles if other != key})
            default = default_row_tile(key) if isinstance(key, RowTuningKey) else default_tile(chip, key)
            assert tile != (others.find(key) or default), f"{chip}: {key} changes nothing"


def test_table_round_trip(tmp_path):
    key = TuningKey(128, 2, 16, False, 1024)
    rows = [(key._replace(length=length), Tile(64, n, 4, 3)) for length, n in ((8192, 64), (1024, 32))]
    rows.append((key._replace(quantized=True), Tile(128, 64, 8, 2)))
    rows += [(RowTuningKey("swiglu", 8192, most), RowTile(256, warps)) for most, warps in ((64, 2), (4, 1))]
    for measured, times in ((None, {}), (MEASURED, {key: 12.5, rows[-1][0]: 3.0})):
        table = Table("sm_77", dict(rows), measured, times)
        launch_table.write_table(table, tmp_path / "sm_77.json")
        assert launch_table.read_table(tmp_path / "sm_77.json") == table
    assert table.tiles == dict(rows)
    found = [table.find(key._replace(length=length)).block_n for length in (1, 1024, 1025, 10**6)]
    assert found == [32, 32, 64, 64]
    assert table.find(key._replace(block_d=64)) is None
    assert [table.find(RowTuningKey("swiglu", 8192, most)).num_warps for most in ROW_BUCKETS] == [1, 2, 2]
    assert table.find(RowTuningKey("swiglu", 4096, 4)) is None


def test_a_write_that_fails_keeps_the_old_table(tmp_path, monkeypatch):
    file, key = tmp_path / "sm_77.json", RowTuningKey("swiglu", 8192, 64)
    table = Table("sm_77", {key: RowTile(256, 2)})
    launch_table.write_table(table, file)

    def fail(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        launch_table.write_table(Table("sm_77", {key: RowTile(512, 2)}), file)
    assert launch_table.read_table(file) == table


def test_invalid_file_is_named_in_the_error(tmp_path):
    (tmp_path / "sm_77.json").write_text('{"chip": "sm_77", "entries": [{"tile": {}}]}')
    with pytest.raises(ValueError, match=r"sm_77\.json: not a table"):
        launch_table.read_table(tmp_path / "sm_77.json")


ATTENTION_ENTRY = {
    "for": {"block_d": 64, "itemsize": 2, "rows": 32, "quantized": False, "length": 1024},
    "tile": {"block_m": 32, "block_n": 64, "num_warps": 4, "num_stages": 3},
}
NORM_ENTRY = {
    "for": {"kind": "add_rms_norm", "width": 4096, "rows": ROW_BUCKETS[-1]},
    "tile": {"elements": 4096, "num_warps": 8},
}
COPY_ENTRY = {
    "for": {"kind": "block_copy", "width": 32768, "rows": ROW_BUCKETS[-1]},
    "tile": {"elements": 4, "num_warps": 1},
}


@pytest.mark.parametrize(
    ("entry", "part", "field", "value"),
    [
        (ATTENTION_ENTRY, "for", "kind", "decode"), (NORM_ENTRY, "for", "kind", "encode"),
        (ATTENTION_ENTRY, "for", "block_d", 80),
        (ATTENTION_ENTRY, "for", "quantized", 0), (ATTENTION_ENTRY, "for", "length", None),
        (ATTENTION_ENTRY, "tile", "block_m", 16),  # must hold the rows
        (ATTENTION_ENTRY, "tile", "block_n", 64.0), (ATTENTION_ENTRY, "tile", "num_stages", 0),
        (NORM_ENTRY, "for", "width", 5000), (NORM_ENTRY, "for", "rows", 4),  # would change the order of a row's sum
        (NORM_ENTRY, "tile", "elements", 2048),  # must be the whole row
        (NORM_ENTRY, "tile", "num_warps", 3), (NORM_ENTRY, "tile", "num_warps", True), (NORM_ENTRY, "tile", "warps", 4),
        (COPY_ENTRY, "tile", "elements", 2),  # must hold a word
    ],
)  # fmt: skip
def test_field_out_of_range_is_rejected(entry, part, field, value, tmp_path):
    file = tmp_path / "sm_77.json"
    for changes in ({}, {part: {**entry[part], field: value}}):
        assert not file.exists() or len(launch_table.read_table(file).tiles) == 1
        file.write_text(json.dumps({"chip": "sm_77", "measured": None, "entries": [{**entry, **changes}]}))
    with pytest.raises(ValueError, match=rf"sm_77\.json: .*{field}={value!r}: must be one of"):
        launch_table.read_table(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chip": "sm_78"}, "chip='sm_78': must be 'sm_77'"),
        ({"measured": vars(MEASURED) | {"gpu": " "}}, "gpu=' ': must be a text that is not empty"),
        ({"measured": vars(MEASURED) | {"gpu": None}}, "gpu=None: must be a text that is not empty"),
        ({"measured": vars(MEASURED) | {"date": "22.11.2026"}}, "22.11.2026"),
        ({"measured": vars(MEASURED) | {"chip": "sm_77"}}, "chip='sm_77': must be one of the fields"),
        ({"measured": {"software": "torch 2", "date": "2026-11-22"}}, "gpu"),
        ({"measured": "A GPU, 2026-11-22"}, "not a table"),
        ({"entries": [{**NORM_ENTRY, "us": 3.0}]}, "us=3.0: must be absent where measured is null"),
        ({"measured": vars(MEASURED), "entries": [{**NORM_ENTRY, "us": 0}]}, "us=0: must be a positive number"),
        ({"measured": vars(MEASURED), "entries": [{**NORM_ENTRY, "us": True}]}, "us=True: must be a positive number"),
        ({"chips": 1}, "chips=1: must be one of the fields"),
        ({"entries": [{**NORM_ENTRY, "note": "x"}]}, "note='x': must be one of the fields"),
    ],
)
def test_wrong_chip_or_unknown_fields_are_rejected(change, message, tmp_path):
    file = tmp_path / "sm_77.json"
    file.write_text(json.dumps({"chip": "sm_77", "measured": None, "entries": [NORM_ENTRY], **change}))
    with pytest.raises(ValueError, match=re.escape(message)):
        launch_table.read_table(file)


def test_missing_field_is_rejected(tmp_path):
    file = tmp_path / "sm_77.json"
    entry = {**NORM_ENTRY, "tile": {"elements": 4096}}
    file.write_text(json.dumps({"chip": "sm_77", "measured": None, "entries": [entry]}))
    with pytest.raises(ValueError, match="num_warps=None: must be one of"):
        launch_table.read_table(file)


@pytest.mark.parametrize(
    ("chip", "nearest"),
    [("sm_90", "sm_90"), ("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_103", "sm_100"), ("sm_120", "sm_80"),
     ("sm_75", "sm_80"), ("gfx950", "gfx942"), ("gfx90a", "gfx942"), ("xpu", None)],
)  # fmt: skip
def test_chip_without_a_table_uses_the_nearest(chip, nearest):
    assert nearest_chip(chip, list(CHIPS)) == nearest


def tile_of(planned):
    """Return the elements that a program processes, and its warps, from the launches of one kernel."""
    named = planned[-2 if len(planned) > 1 else 0].arguments  # for sampling, the pass over the logits
    of_heads = named.get("BLOCK_H", 0) * named.get("BLOCK_D", 2 * named.get("BLOCK_HALF", 0))
    return of_heads or named.get("BLOCK") or named["TILE"] * named.get("WORD", 1), named["num_warps"]


@pytest.mark.parametrize("kind", DEFAULT_ROW_TILES)
def test_kernels_use_the_tile_of_the_table_or_the_default(kind, tables, monkeypatch):
    monkeypatch.setattr(tuning_inputs, "MEDIUM_ROWS", 3)
    key = RowTuningKey(kind, 1024, ROW_BUCKETS[-1] if kind in ROW_COUNT_INVARIANT else 4)
    for chip, expected in (
        ("sm_91", RowTile(1024 if kind == "add_rms_norm" else 512, 16)),
        ("xpu", default_row_tile(key)),
    ):
        if chip == "sm_91":
            launch_table.use_table(Table(chip, {key: expected}))
        monkeypatch.setattr(tuning_inputs, "device_of", lambda device, chip=chip: Device(chip, 132))
        planned = make_problem(key, torch.device("cpu"), torch.float16).plans[0]()
        assert tile_of(planned) == (expected.elements, expected.num_warps)


@pytest.mark.parametrize("kind", DEFAULT_ROW_TILES)
def test_tiles_of_summed_rows_do_not_depend_on_the_number_of_rows(kind, tables):
    entries = [
        (RowTuningKey(kind, 4096, rows), RowTile(1024, warps))
        for rows, warps in zip(ROW_BUCKETS, (1, 2, 4), strict=True)
    ]
    for rows in ROW_BUCKETS:  # defaults, before a table is in use
        assert launch_table.row_tile("sm_91", kind, width=3000, rows=rows).num_warps >= 4
    launch_table.use_table(Table("sm_91", dict(entries)))
    tiles = [launch_table.row_tile("sm_91", kind, width=3000, rows=rows) for rows in (1, 4, 5, 64, 65, 10**6)]
    invariant = kind in ("norm_rope_kv_write", "add_rms_norm", "block_copy")
    assert [tile.num_warps for tile in tiles] == ([4] * 6 if invariant else [1, 1, 2, 2, 4, 4])


def test_tables_do_not_change_the_filter_sums(tables):
    """The order of these sums decides which tokens a filter keeps."""
    from paged_kernels.sampling import plan_launch
    from paged_kernels.sampling_metadata import SamplingFilters, SamplingMetadata

    entries = [(RowTuningKey("sampling", 65536, 4), RowTile(1024, 2))]
    launch_table.use_table(Table("sm_91", dict(entries)))
    ones, integers = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    metadata = SamplingMetadata(ones, integers, integers, SamplingFilters(integers.int(), ones, ones))
    for filters, tiles in ((None, [(1024, 2), (None, 1)]), (metadata.filters, [(4096, 8), (2048, 8)])):
        planned = plan_launch(
            torch.zeros(2, 50000), replace(metadata, filters=filters), integers, device=Device("sm_91", 1)
        )
        assert [(one.arguments.get("TILE"), one.arguments["num_warps"]) for one in planned] == tiles
