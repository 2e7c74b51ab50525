"""What launches are cut into, the tables that say so, and the tuner that writes them."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch
from paged_kernels import launch
from paged_kernels import tune as tuner
from paged_kernels.launch import (
    CONFIGS,
    DEFAULT_ROW_TILES,
    ROW_BUCKETS,
    ROW_COUNT_INVARIANT,
    Device,
    RowTile,
    RowTuningKey,
    Tile,
    TuningKey,
    count_splits,
    default_row_tile,
    default_tile,
    launch_shape,
    nearest_chip,
    prefix_tile,
)
from paged_kernels.tune import candidates, measure_with, points, trial, tune

CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")
LLAMA = dict(head_dim=128, itemsize=2, group=4, quantized=False, num_kv_heads=8, multiprocessors=132)


@pytest.fixture
def tables(monkeypatch):
    """Tables that are used in a test are forgotten after it."""
    launch._row_tile.cache_clear()
    monkeypatch.setattr(launch, "_tables", {})
    yield
    launch._row_tile.cache_clear()


def shape_of(chip="sm_90", **changes):
    facts = {**LLAMA, "num_tokens": 64, "max_query_len": 1, "max_context_len": 8192, **changes}
    return launch_shape(chip=chip, **facts)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("group", [1, 3, 8, 16, 48, 71])
def test_a_tile_holds_what_its_launch_shape_promises(group, itemsize):
    for max_query_len in (1, 2, 5, 512):
        shape = shape_of(group=group, itemsize=itemsize, max_query_len=max_query_len, num_tokens=4096)
        assert 1 <= shape.HEADS <= min(group, shape.SMALL_M)
        assert shape.LARGE_M in (0, 16, 64, 128)
        assert shape.LARGE_M > 0 or max_query_len * shape.HEADS <= shape.SMALL_M
        assert max_query_len > 1 or shape.LARGE_M == 0


def test_large_tiles_fill_matrix_instructions_where_there_are_rows_enough():
    assert shape_of(max_query_len=2048, num_tokens=4096).LARGE_M == 128
    assert shape_of(max_query_len=256, num_tokens=256).LARGE_M == 64  # 64 programs of 128 rows would idle half of 132
    assert shape_of(max_query_len=2048, num_tokens=4096).SMALL_M == 16  # for the decode rows beside the chunk


@pytest.mark.parametrize("multiprocessors", [108, 132, 148, 304])
def test_splits_fill_the_device_and_no_more(multiprocessors):
    for rows in (1, 4, 16, 17, 64, 256):
        for length in (1, 200, 512, 4096, 32768, 131072):
            splits = count_splits(rows * 8, length, multiprocessors)
            most = max(1, min(launch.MAX_SPLITS, launch.power_of_two(length) // launch.MIN_SPLIT))
            assert 1 <= splits <= most

            def busy(s, rows=rows):
                return rows * 8 * s / (multiprocessors * -(-rows * 8 * s // multiprocessors))

            assert busy(splits) >= 0.9 * max(busy(s) for s in range(1, most + 1))
    assert count_splits(256 * 8, 8192, multiprocessors) == 1


def test_seventeen_rows_of_eight_heads_do_not_wait_for_four_programs():
    splits = count_splits(136, 8192, 132)
    assert 136 * splits / (132 * -(-136 * splits // 132)) > 0.85


def test_lengths_of_one_bucket_are_split_alike():
    assert len({count_splits(8, length, 132) for length in range(4097, 8193, 64)}) == 1


def test_prefix_tiles_hold_the_rows_there_are():
    facts = dict(chip="sm_90", head_dim=128, itemsize=2, group=4, quantized=False)
    assert prefix_tile(**facts, num_seqs=8).block_m == 64
    assert prefix_tile(**facts, num_seqs=64).block_m == 128
    assert prefix_tile(**{**facts, "group": 71, "itemsize": 4}, num_seqs=64).block_m == 16


# --- tables


def test_every_chip_that_is_compiled_for_has_a_table_that_says_who_made_it():
    assert sorted(file.stem for file in CONFIGS.glob("*.json")) == sorted(CHIPS)
    for chip in CHIPS:
        table = launch.read_table(CONFIGS / f"{chip}.json")
        assert table.chip == chip
        assert table.rows()
        assert "measured" in json.loads((CONFIGS / f"{chip}.json").read_text())
        for facts, tile in table.rows():
            others = launch.make_table(chip, None, [row for row in table.rows() if row[0] != facts])
            default = default_row_tile(facts) if isinstance(facts, RowTuningKey) else default_tile(chip, facts)
            assert tile != (others.find(facts) or default), f"{chip}: {facts} changes nothing"


def test_a_table_comes_back_as_it_was_written(tmp_path):
    facts = TuningKey("decode", 128, 2, 16, False, 1024)
    rows = [(dataclasses.replace(facts, length=length), Tile(16, n, 4, 3)) for length, n in ((8192, 64), (1024, 32))]
    rows.append((dataclasses.replace(facts, kind="prefill"), Tile(128, 64, 8, 2)))
    rows += [(RowTuningKey("swiglu", 8192, most), RowTile(256, warps)) for most, warps in ((64, 2), (4, 1))]
    table = launch.make_table("sm_77", None, rows)
    launch.write_table(table, tmp_path / "sm_77.json")
    assert launch.read_table(tmp_path / "sm_77.json") == table
    found = [table.find(dataclasses.replace(facts, length=length)).block_n for length in (1, 1024, 1025, 10**6)]
    assert found == [32, 32, 64, 64]
    assert table.find(dataclasses.replace(facts, block_d=64)) is None
    assert [table.find(RowTuningKey("swiglu", 8192, most)).num_warps for most in ROW_BUCKETS] == [1, 2, 2]
    assert table.find(RowTuningKey("swiglu", 4096, 4)) is None


def test_a_file_that_is_no_table_is_named(tmp_path):
    (tmp_path / "sm_77.json").write_text('{"chip": "sm_77", "entries": [{"tile": {}}]}')
    with pytest.raises(ValueError, match=r"sm_77\.json: not a table"):
        launch.read_table(tmp_path / "sm_77.json")


ATTENTION_ENTRY = {
    "for": {"kind": "decode", "block_d": 64, "itemsize": 2, "rows": 32, "quantized": False, "length": 1024},
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
        (ATTENTION_ENTRY, "for", "kind", "encode"), (ATTENTION_ENTRY, "for", "block_d", 80),
        (ATTENTION_ENTRY, "for", "quantized", 0), (ATTENTION_ENTRY, "for", "length", None),
        (ATTENTION_ENTRY, "tile", "block_m", 16),  # has to hold the rows
        (ATTENTION_ENTRY, "tile", "block_n", 64.0), (ATTENTION_ENTRY, "tile", "num_stages", 0),
        (NORM_ENTRY, "for", "width", 5000), (NORM_ENTRY, "for", "rows", 4),  # would be the order of a row's sum
        (NORM_ENTRY, "tile", "elements", 2048),  # has to be the row
        (NORM_ENTRY, "tile", "num_warps", 3), (NORM_ENTRY, "tile", "num_warps", True), (NORM_ENTRY, "tile", "warps", 4),
        (COPY_ENTRY, "tile", "elements", 2),  # has to hold a word
    ],
)  # fmt: skip
def test_a_table_with_a_field_out_of_range_is_refused(entry, part, field, value, tmp_path):
    file = tmp_path / "sm_77.json"
    for changes in ({}, {part: {**entry[part], field: value}}):
        assert not file.exists() or len(launch.read_table(file).rows()) == 1
        file.write_text(json.dumps({"chip": "sm_77", "measured": None, "entries": [{**entry, **changes}]}))
    with pytest.raises(ValueError, match=rf"sm_77\.json: .*{field}={value!r}: must be one of"):
        launch.read_table(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chip": "sm_78"}, "chip='sm_78': must be 'sm_77'"),
        ({"measured": 3}, "measured=3: must be a text, or null"),
        ({"chips": 1}, "chips=1: must be one of the fields"),
        ({"entries": [{**NORM_ENTRY, "us": 3.0}]}, "us=3.0: must be one of the fields"),
    ],
)
def test_a_table_that_is_another_chips_or_has_other_fields_is_refused(change, message, tmp_path):
    file = tmp_path / "sm_77.json"
    file.write_text(json.dumps({"chip": "sm_77", "measured": None, "entries": [NORM_ENTRY], **change}))
    with pytest.raises(ValueError, match=re.escape(message)):
        launch.read_table(file)


def test_a_damaged_line_of_the_tuners_journal_is_named(tmp_path):
    file = tmp_path / "sm_77.journal"
    whole = json.dumps({**NORM_ENTRY, "us": 3.0})
    for damaged in ('{"for"', json.dumps(NORM_ENTRY)):
        file.write_text(f"{whole}\n{damaged}\n{whole}\n")
        with pytest.raises(ValueError, match=r"sm_77\.journal, line 2: not a timing"):
            tuner.read_journal(file)


def test_a_table_without_a_field_is_refused(tmp_path):
    file = tmp_path / "sm_77.json"
    entry = {**NORM_ENTRY, "tile": {"elements": 4096}}
    file.write_text(json.dumps({"chip": "sm_77", "measured": None, "entries": [entry]}))
    with pytest.raises(ValueError, match="num_warps=None: must be one of"):
        launch.read_table(file)


@pytest.mark.parametrize(
    ("chip", "nearest"),
    [("sm_90", "sm_90"), ("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_103", "sm_100"), ("sm_120", "sm_80"),
     ("sm_75", "sm_80"), ("gfx950", "gfx942"), ("gfx90a", "gfx942"), ("xpu", None)],
)  # fmt: skip
def test_a_chip_without_a_table_does_as_its_nearest(chip, nearest):
    assert nearest_chip(chip, list(CHIPS)) == nearest


def test_a_table_in_use_decides_the_launch(tables):
    assert shape_of("sm_91").SMALL_N != 128
    facts = TuningKey("decode", 128, 2, 16, False, 8192)
    launch.use_table(launch.make_table("sm_91", None, [(facts, Tile(16, 128, 2, 5))]))
    shape = shape_of("sm_91")
    assert (shape.SMALL_N, shape.num_warps, shape.SMALL_STAGES) == (128, 2, 5)


def pieces_of(planned):
    """Of the launches of one kernel: what a program takes at a time, and its warps."""
    named = planned[-2 if len(planned) > 1 else 0].arguments  # of sampling the pass over the logits
    of_heads = named.get("BLOCK_H", 0) * named.get("BLOCK_D", 2 * named.get("BLOCK_HALF", 0))
    return of_heads or named.get("BLOCK") or named["TILE"] * named.get("WORD", 1), named["num_warps"]


@pytest.mark.parametrize("kind", DEFAULT_ROW_TILES)
def test_every_kernel_takes_the_piece_of_its_table_and_without_one_the_default(kind, tables, monkeypatch):
    monkeypatch.setattr(tuner, "MIDDLE", 3)
    facts = RowTuningKey(kind, 1024, ROW_BUCKETS[-1] if kind in ROW_COUNT_INVARIANT else 4)
    for chip, wanted in (
        ("sm_91", RowTile(1024 if kind == "add_rms_norm" else 512, 16)),
        ("xpu", default_row_tile(facts)),
    ):
        if chip == "sm_91":
            launch.use_table(launch.make_table(chip, None, [(facts, wanted)]))
        monkeypatch.setattr(launch, "device_of", lambda device, chip=chip: Device(chip, 132))
        planned = trial(facts, torch.device("cpu"), torch.float16).plans[0]()
        assert pieces_of(planned) == (wanted.elements, wanted.num_warps)


@pytest.mark.parametrize("kind", DEFAULT_ROW_TILES)
def test_a_row_that_is_summed_is_summed_alike_beside_any_others(kind, tables):
    entries = [
        (RowTuningKey(kind, 4096, rows), RowTile(1024, warps))
        for rows, warps in zip(ROW_BUCKETS, (1, 2, 4), strict=True)
    ]
    for rows in ROW_BUCKETS:  # without a table yet
        assert launch.row_tile(Device("sm_91", 1), kind, width=3000, rows=rows).num_warps >= 4
    launch.use_table(launch.make_table("sm_91", None, entries))
    pieces = [launch.row_tile(Device("sm_91", 1), kind, width=3000, rows=rows) for rows in (1, 4, 5, 64, 65, 10**6)]
    alike = kind in ("norm_rope_kv_write", "add_rms_norm", "block_copy")
    assert [row_tile.num_warps for row_tile in pieces] == ([4] * 6 if alike else [1, 1, 2, 2, 4, 4])


def test_the_sums_of_a_filter_are_in_no_table(tables):
    """Their order decides draws."""
    from paged_kernels.draws import SamplingFilters, SamplingMetadata
    from paged_kernels.sampling import plan_launch

    launch.use_table(launch.make_table("sm_91", None, [(RowTuningKey("sampling", 65536, 4), RowTile(1024, 2))]))
    ones, whole = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    draws = SamplingMetadata(ones, whole, whole, SamplingFilters(whole.int(), ones, ones))
    least, best, first = plan_launch(torch.zeros(2, 50000), draws, whole, device=Device("sm_91", 1))
    assert (least.arguments["TILE"], least.arguments["num_warps"]) == (4096, 16)
    assert (best.arguments["TILE"], best.arguments["num_warps"], best.grid) == (1024, 2, (2, 49))
    assert first.arguments["TILES"] == 64


# --- the tuner


def test_candidates_contain_what_every_table_has():
    for chip in CHIPS:
        for facts, tile in launch.read_table(CONFIGS / f"{chip}.json").rows():
            assert tile in set(candidates(facts)), (chip, facts, tile)
    for facts in points(quick=False):
        rows = isinstance(facts, RowTuningKey)
        assert (default_row_tile(facts) if rows else default_tile("sm_90", facts)) in set(candidates(facts))
        assert len(set(candidates(facts))) > (3 if rows else 10)


def test_every_kernel_is_tuned_and_what_is_tuned_makes_a_table(tmp_path):
    assert len(set(points(quick=False))) == len(points(quick=False))
    assert set(points(quick=True)) < set(points(quick=False))
    for quick in (True, False):
        assert {facts.kind for facts in points(quick=quick)} == {"decode", "prefill", *DEFAULT_ROW_TILES}
        rows = [(facts, shape) for facts in points(quick=quick) for shape in candidates(facts)]
        for some in (rows, rows[::-1]):
            launch.write_table(launch.make_table("sm_77", None, some), tmp_path / "sm_77.json")
            assert len(launch.read_table(tmp_path / "sm_77.json").rows()) == len(points(quick=quick))


SMALL = [
    *(RowTuningKey(kind, 256, ROW_BUCKETS[-1] if kind in ROW_COUNT_INVARIANT else 4) for kind in DEFAULT_ROW_TILES),
    TuningKey("decode", 16, 2, 16, False, 40),
    TuningKey("prefill", 16, 2, 16, False, 40),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run in the interpreter")
@pytest.mark.parametrize("facts", SMALL, ids=lambda facts: facts.kind)
def test_only_what_is_as_the_reference_is_timed(facts, tables, monkeypatch):
    """And pieces change no bit, but for the order of a norm's sum."""
    fewer = {"MIDDLE": 3, "TENSORS": 2, "NUM_KV_HEADS": 1, "DECODING": 3, "PREFILLING": 2, "CACHED": 30}
    for name, value in fewer.items():
        monkeypatch.setattr(tuner, name, value)
    trials, found = [], []

    def made(*given, **named):
        trials.append(trial(*given, **named))
        return trials[-1]

    def timer(run):
        run()
        found.append([one.clone() for one in trials[-1].outputs])
        return 7.0

    monkeypatch.setattr(tuner, "trial", made)
    measure = measure_with(timer, torch.device("cpu"), dtype=torch.float16)
    shapes = sorted(set(candidates(facts)), key=str)
    assert [measure(facts, shape) for shape in (shapes[0], shapes[-1])] == [7.0, 7.0]
    assert len(trials) == 1
    assert isinstance(facts, TuningKey) or "norm" in facts.kind or all(map(torch.equal, *found))
    found.clear()
    with monkeypatch.context() as patch:  # what others have left there does not count
        patch.setattr(launch.Launch, "run", lambda self: None)
        assert measure(facts, shapes[0]) is None
    wrong = trials[0].expected[-1]
    wrong.copy_(wrong + (wrong.abs().max() if wrong.is_floating_point() else 1))
    assert measure(facts, shapes[0]) is None
    assert not found


def test_the_fastest_that_runs_is_written_and_a_stopped_run_goes_on(tmp_path):
    file, wanted, asked = tmp_path / "sm_77.json", [*points(quick=True)[:2], RowTuningKey("swiglu", 1024, 64)], []

    def measure(facts, tile):
        asked.append((facts, tile))
        if isinstance(tile, RowTile):
            return abs(tile.elements - 512) + tile.num_warps / 100
        return None if tile.num_stages == 4 else 10.0 - tile.num_stages + tile.block_n / 1000 + tile.num_warps / 100

    def stopped_after(count):
        def stopped(facts, tile):
            if len(asked) == count:
                raise KeyboardInterrupt
            return measure(facts, tile)

        return stopped

    for count in (2, len(set(candidates(wanted[0]))) + 3):
        with pytest.raises(KeyboardInterrupt):
            tune("sm_77", wanted, stopped_after(count), file=file, machine="a machine", show=lambda line: None)
        with file.with_suffix(".journal").open("a") as journal:
            journal.write('{"for": {"kind"')  # the machine went off in the middle of a line
    assert [facts for facts, _ in launch.read_table(file).rows()] == wanted[:1]  # what it has come to
    first, lines = list(asked), []
    asked.clear()
    table = tune("sm_77", wanted, measure, file=file, machine="a machine", show=lines.append)
    assert not set(first) & set(asked)
    assert len(first) + len(asked) == sum(len(set(candidates(facts))) for facts in wanted)
    assert len(lines) == len(asked)
    assert "skipped" in "".join(lines)
    assert table == launch.read_table(file)
    assert table.measured == "a machine"
    assert [tile.num_stages for _, tile in table.rows()[:2]] == [3, 3]
    assert table.rows()[2:] == [(wanted[2], RowTile(512, 1))]
    assert not file.with_suffix(".journal").exists()


def test_tuning_keeps_what_it_was_not_asked_for(tmp_path):
    file = tmp_path / "sm_77.json"
    other = TuningKey("decode", 64, 2, 16, False, 1024)
    launch.write_table(launch.make_table("sm_77", None, [(other, Tile(16, 32, 2, 2))]), file)
    tune("sm_77", points(quick=True), lambda facts, tile: 1.0, file=file, machine="m", show=lambda line: None)
    assert dict(launch.read_table(file).rows())[other] == Tile(16, 32, 2, 2)
    assert len(launch.read_table(file).rows()) == 1 + len(points(quick=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune on")
def test_without_a_gpu_the_tuner_says_so(compiled_environment):
    done = subprocess.run(
        [sys.executable, "-m", "paged_kernels.tune"], capture_output=True, text=True, env=compiled_environment
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no GPU here" in done.stderr
