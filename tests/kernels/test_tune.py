"""The tuner that writes tables of tile shapes."""

import json
import subprocess
import sys

import pytest
import torch

from paged_kernels import launch, launch_table, tuning_inputs
from paged_kernels import tune as tuner
from paged_kernels.launch_table import (
    CONFIGS,
    DEFAULT_ROW_TILES,
    ROW_BUCKETS,
    ROW_COUNT_INVARIANT,
    RowTile,
    RowTuningKey,
    Tile,
    TuningKey,
    default_row_tile,
    default_tile,
)
from paged_kernels.tune import candidates, measure_with, tune, tuning_keys
from paged_kernels.tuning_inputs import make_problem

CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")
ENTRY = {
    "for": {"kind": "add_rms_norm", "width": 4096, "rows": ROW_BUCKETS[-1]},
    "tile": {"elements": 4096, "num_warps": 8},
}


def test_candidates_include_all_table_entries_and_defaults():
    for chip in CHIPS:
        for key, tile in launch_table.read_table(CONFIGS / f"{chip}.json").entries():
            assert tile in set(candidates(key)), (chip, key, tile)
    for key in tuning_keys(quick=False):
        rows = isinstance(key, RowTuningKey)
        assert (default_row_tile(key) if rows else default_tile("sm_90", key)) in set(candidates(key))
        assert len(set(candidates(key))) > (3 if rows else 10)


def test_tuning_keys_cover_every_kernel_and_form_a_valid_table(tmp_path):
    assert len(set(tuning_keys(quick=False))) == len(tuning_keys(quick=False))
    assert set(tuning_keys(quick=True)) < set(tuning_keys(quick=False))
    for quick in (True, False):
        assert {key.kind for key in tuning_keys(quick=quick)} == {"decode", "prefill", *DEFAULT_ROW_TILES}
        rows = [(key, tile) for key in tuning_keys(quick=quick) for tile in candidates(key)]
        for entries in (rows, rows[::-1]):
            launch_table.write_table(launch_table.make_table("sm_77", None, entries), tmp_path / "sm_77.json")
            assert len(launch_table.read_table(tmp_path / "sm_77.json").entries()) == len(tuning_keys(quick=quick))


SMALL_KEYS = [
    *(RowTuningKey(kind, 256, ROW_BUCKETS[-1] if kind in ROW_COUNT_INVARIANT else 4) for kind in DEFAULT_ROW_TILES),
    TuningKey("decode", 16, 2, 16, False, 40),
    TuningKey("prefill", 16, 2, 16, False, 40),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run in the interpreter")
@pytest.mark.parametrize("key", SMALL_KEYS, ids=lambda key: key.kind)
def test_only_correct_candidates_are_timed(key, tables, monkeypatch):
    """Tiles do not change the bits of a result, except for the order of a norm's sum."""
    small = dict(
        MEDIUM_ROWS=3, COPY_TENSORS=2, NUM_KV_HEADS=1, MAX_DECODE_SEQS=3, PREFILL_SEQS=2, CACHED_TOKENS=30
    )  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(tuning_inputs, name, value)
    problems, results = [], []

    def spy(*args, **kwargs):
        problems.append(make_problem(*args, **kwargs))
        return problems[-1]

    def timer(run):
        run()
        results.append([one.clone() for one in problems[-1].outputs])
        return 7.0

    monkeypatch.setattr(tuner, "make_problem", spy)
    measure = measure_with(timer, torch.device("cpu"), dtype=torch.float16)
    tiles = sorted(set(candidates(key)), key=str)
    assert [measure(key, tile) for tile in (tiles[0], tiles[-1])] == [7.0, 7.0]
    assert len(problems) == 1
    assert isinstance(key, TuningKey) or "norm" in key.kind or all(map(torch.equal, *results))
    results.clear()
    with monkeypatch.context() as patch:  # results of an earlier candidate do not count
        patch.setattr(launch.Launch, "run", lambda self: None)
        assert measure(key, tiles[0]) is None
    wrong = problems[0].expected[-1]
    wrong.copy_(wrong + (wrong.abs().max() if wrong.is_floating_point() else 1))
    assert measure(key, tiles[0]) is None
    assert not results


def test_fastest_tile_is_written_and_an_interrupted_run_continues(tmp_path):
    file, keys, measured = tmp_path / "sm_77.json", [*tuning_keys(quick=True)[:2], RowTuningKey("swiglu", 1024, 64)], []

    def measure(key, tile):
        measured.append((key, tile))
        if isinstance(tile, RowTile):
            return abs(tile.elements - 512) + tile.num_warps / 100
        return None if tile.num_stages == 4 else 10.0 - tile.num_stages + tile.block_n / 1000 + tile.num_warps / 100

    def interrupted_after(count):
        def interrupted(key, tile):
            if len(measured) == count:
                raise KeyboardInterrupt
            return measure(key, tile)

        return interrupted

    for count in (2, len(set(candidates(keys[0]))) + 3):
        with pytest.raises(KeyboardInterrupt):
            tune("sm_77", keys, interrupted_after(count), file=file, machine="a machine", show=lambda line: None)
        with file.with_suffix(".journal").open("a") as journal:
            journal.write('{"for": {"kind"')  # the process was killed while it wrote a line
    assert [key for key, _ in launch_table.read_table(file).entries()] == keys[:1]
    first, lines = list(measured), []
    measured.clear()
    table = tune("sm_77", keys, measure, file=file, machine="a machine", show=lines.append)
    assert not set(first) & set(measured)
    assert len(first) + len(measured) == sum(len(set(candidates(key))) for key in keys)
    assert len(lines) == len(measured)
    assert "skipped" in "".join(lines)
    assert table == launch_table.read_table(file)
    assert table.measured == "a machine"
    assert [tile.num_stages for _, tile in table.entries()[:2]] == [3, 3]
    assert table.entries()[2:] == [(keys[2], RowTile(512, 1))]
    assert not file.with_suffix(".journal").exists()


def test_damaged_journal_line_is_named_in_the_error(tmp_path):
    file = tmp_path / "sm_77.journal"
    whole = json.dumps({**ENTRY, "us": 3.0})
    for damaged in ('{"for"', json.dumps(ENTRY)):
        file.write_text(f"{whole}\n{damaged}\n{whole}\n")
        with pytest.raises(ValueError, match=r"sm_77\.journal, line 2: not a timing"):
            tuner.read_journal(file)


def test_tuning_keeps_other_entries(tmp_path):
    file = tmp_path / "sm_77.json"
    other = TuningKey("decode", 64, 2, 16, False, 1024)
    launch_table.write_table(launch_table.make_table("sm_77", None, [(other, Tile(16, 32, 2, 2))]), file)
    tune("sm_77", tuning_keys(quick=True), lambda key, tile: 1.0, file=file, machine="m", show=lambda line: None)
    assert dict(launch_table.read_table(file).entries())[other] == Tile(16, 32, 2, 2)
    assert len(launch_table.read_table(file).entries()) == 1 + len(tuning_keys(quick=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune on")
def test_tuner_without_a_gpu_exits_with_an_error(compiled_environment):
    done = subprocess.run(
        [sys.executable, "-m", "paged_kernels.tune"], capture_output=True, text=True, env=compiled_environment
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no GPU found" in done.stderr
