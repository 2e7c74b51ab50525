"""What launches are cut into, the tables that say so, and the tuner that writes them."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from kernels import launch
from kernels.bench.tune import candidates, points, tune
from kernels.launch import CONFIGS, Facts, Tile, count_splits, default_tile, launch_shape, nearest_chip, prefix_tile

CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")
LLAMA = dict(head_dim=128, itemsize=2, group=4, quantized=False, num_kv_heads=8, multiprocessors=132)


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
            assert tile.block_m >= facts.rows
            assert tile != default_tile(chip, facts), f"{chip}: {facts} is the default"


def test_a_table_comes_back_as_it_was_written(tmp_path):
    facts = Facts("decode", 128, 2, 16, False, 1024)
    rows = [(dataclasses.replace(facts, length=length), Tile(16, n, 4, 3)) for length, n in ((8192, 64), (1024, 32))]
    rows.append((dataclasses.replace(facts, kind="prefill"), Tile(128, 64, 8, 2)))
    table = launch.table_of("sm_77", None, rows)
    launch.write_table(table, tmp_path / "sm_77.json")
    assert launch.read_table(tmp_path / "sm_77.json") == table
    found = [table.find(dataclasses.replace(facts, length=length)).block_n for length in (1, 1024, 1025, 10**6)]
    assert found == [32, 32, 64, 64]
    assert table.find(dataclasses.replace(facts, block_d=64)) is None


def test_a_file_that_is_no_table_is_named(tmp_path):
    (tmp_path / "sm_77.json").write_text('{"chip": "sm_77", "entries": [{"tile": {}}]}')
    with pytest.raises(ValueError, match=r"sm_77\.json: not a table"):
        launch.read_table(tmp_path / "sm_77.json")


@pytest.mark.parametrize(
    ("chip", "nearest"),
    [("sm_90", "sm_90"), ("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_103", "sm_100"), ("sm_120", "sm_80"),
     ("sm_75", "sm_80"), ("gfx950", "gfx942"), ("gfx90a", "gfx942"), ("xpu", None)],
)  # fmt: skip
def test_a_chip_without_a_table_does_as_its_nearest(chip, nearest):
    assert nearest_chip(chip, list(CHIPS)) == nearest


def test_a_table_in_use_decides_the_launch(monkeypatch):
    monkeypatch.setattr(launch, "_tables", {})
    assert shape_of("sm_91").SMALL_N != 128
    facts = Facts("decode", 128, 2, 16, False, 8192)
    launch.use_table(launch.table_of("sm_91", None, [(facts, Tile(16, 128, 2, 5))]))
    shape = shape_of("sm_91")
    assert (shape.SMALL_N, shape.num_warps, shape.SMALL_STAGES) == (128, 2, 5)


# --- the tuner


def test_candidates_contain_what_every_table_has():
    for chip in CHIPS:
        for facts, tile in launch.read_table(CONFIGS / f"{chip}.json").rows():
            assert tile in set(candidates(facts)), (chip, facts, tile)
    for facts in points(quick=False):
        assert default_tile("sm_90", facts) in set(candidates(facts))
        assert len(set(candidates(facts))) > 10


def test_the_fastest_that_runs_is_written_and_a_stopped_run_goes_on(tmp_path):
    file, wanted, asked = tmp_path / "sm_77.json", points(quick=True), []

    def measure(facts, tile):
        asked.append((facts, tile))
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
    assert [tile.num_stages for _, tile in table.rows()] == [3, 3]
    assert not file.with_suffix(".journal").exists()


def test_tuning_keeps_what_it_was_not_asked_for(tmp_path):
    file = tmp_path / "sm_77.json"
    other = Facts("decode", 64, 2, 16, False, 1024)
    launch.write_table(launch.table_of("sm_77", None, [(other, Tile(16, 32, 2, 2))]), file)
    tune("sm_77", points(quick=True), lambda facts, tile: 1.0, file=file, machine="m", show=lambda line: None)
    assert dict(launch.read_table(file).rows())[other] == Tile(16, 32, 2, 2)
    assert len(launch.read_table(file).rows()) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune on")
def test_without_a_gpu_the_tuner_says_so(compiled_environment):
    done = subprocess.run(
        [sys.executable, "-m", "kernels.bench.tune"], capture_output=True, text=True, env=compiled_environment
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no GPU here" in done.stderr
