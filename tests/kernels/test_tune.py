"""The tuner that writes tables of tile shapes."""

import json
import runpy
import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from paged_kernels import launch, launch_table, paged_attention, tuning_inputs
from paged_kernels import tune as tuner
from paged_kernels.launch_table import (
    CONFIGS,
    DEFAULT_ROW_TILES,
    ROW_BUCKETS,
    ROW_COUNT_INVARIANT,
    Measurement,
    RowTile,
    RowTuningKey,
    Tile,
    TuningKey,
    default_row_tile,
    default_tile,
)
from paged_kernels.tune import candidates, points_of, print_progress, start_with, tune, tuning_keys
from paged_kernels.tuning_inputs import make_problem

CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")
MEASURED = Measurement("A GPU", "torch 2, triton 3", "2026-11-22")
KEYS = [TuningKey(128, 2, 16, False, 512), RowTuningKey("swiglu", 1024, 64), RowTuningKey("sampling", 1024, 64)]
# Runs the tuner on the CPU as for an H100. Prints whether each compilation of its own process came from the cache.
TUNE_WITHOUT_A_GPU = """
import sys, json, torch, triton
from pathlib import Path
from triton import knobs
from triton.runtime import driver
from paged_kernels import tune as tuner, tuning_inputs
from paged_kernels.launch import Launch
from paged_kernels.launch_table import Measurement, RowTuningKey, TuningKey
from paged_kernels.compilation import Compiler, missing_variants
from tests.support.fake_gpu import FakeDriver

if __name__ == "__main__":
    driver.set_active(FakeDriver())
    Launch.run = lambda self: self.kernel.warmup(**self.arguments, grid=self.grid)
    tuning_inputs.NUM_KV_HEADS, tuning_inputs.PREFILL_SEQS, tuning_inputs.CACHED_TOKENS = 1, 2, 300
    tuning_inputs.Problem.is_correct = lambda self: True
    choose = tuner.candidates
    tuner.candidates = lambda key: list(choose(key))[:1]
    loaded = []
    knobs.compilation.listener = lambda **details: loaded.append((details["src"].name, details["cache_hit"]))
    rows = [RowTuningKey("norm_rope_kv_write", 256, 4096), RowTuningKey("sampling", 256, 4)]
    keys = [TuningKey(16, 2, 16, True, 40), *rows]
    with Compiler(2, spare_seconds=3600, max_seconds=3600) as compiler:
        start = tuner.start_with(
            lambda run: 7.0, lambda launches: compiler.submit(missing_variants(launches)), torch.device("cpu")
        )
        table = tuner.tune("sm_90", keys, start, file=Path(sys.argv[1]), measured=Measurement("a", "b", "2026-11-22"),
                           show=lambda line, done=False: None)
    print(json.dumps({"loaded": loaded, "timed": len(table.times)}))
"""


def done(result=None):
    future = Future()
    future.set_result(result)
    return future


def start_from(measure, started=None):
    """Return a function like that of `start_with`, which gets its results from `measure`."""

    def start(key):
        if started is not None:
            started.append(key)
        return ((tile, measure(key, tile)) for tile in dict.fromkeys(candidates(key)))

    return start


def run(keys, start, file, measured=MEASURED, fresh=False, show=lambda line, done=False: None):
    return tune("sm_77", keys, start, file=file, measured=measured, fresh=fresh, show=show)


def test_candidates_include_all_table_entries_and_defaults():
    for chip in CHIPS:
        for key, tile in launch_table.read_table(CONFIGS / f"{chip}.json").tiles.items():
            assert tile in set(candidates(key)), (chip, key, tile)
    for key in [*tuning_keys(quick=False), TuningKey(64, 4, 16, False, 512), TuningKey(256, 4, 16, True, 64)]:
        rows = isinstance(key, RowTuningKey)
        assert (default_row_tile(key) if rows else default_tile("sm_90", key)) in set(candidates(key))
        assert len(set(candidates(key))) > (3 if rows else 10)


SMALL_KEYS = [
    *(RowTuningKey(kind, 256, ROW_BUCKETS[-1] if kind in ROW_COUNT_INVARIANT else 4) for kind in DEFAULT_ROW_TILES),
    TuningKey(16, 2, 16, False, 40),
    TuningKey(16, 2, 16, True, 40),
]


@pytest.fixture
def small_problems(monkeypatch, tables):
    """Make the tuner's inputs small enough for the interpreter, and return a list to which each is added."""
    for name, value in dict(MEDIUM_ROWS=3, COPY_TENSORS=2, NUM_KV_HEADS=1, PREFILL_SEQS=2, CACHED_TOKENS=30).items():
        monkeypatch.setattr(tuning_inputs, name, value)
    problems = []

    def spy(*args, **kwargs):
        problems.append(make_problem(*args, **kwargs))
        return problems[-1]

    monkeypatch.setattr(tuner, "make_problem", spy)
    return problems


def choose(monkeypatch, *tiles):
    monkeypatch.setattr(tuner, "candidates", lambda key: tiles)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run in the interpreter")
@pytest.mark.parametrize("key", SMALL_KEYS, ids=lambda key: getattr(key, "kind", f"prefill-{key}"))
def test_only_correct_candidates_are_timed(key, small_problems, monkeypatch):
    """Tiles do not change the bits of a result, except for the order of a norm's sum."""
    results = []

    def timer(run):
        run()
        results.append([one.clone() for one in small_problems[-1].outputs])
        return 7.0

    options = dict(dtype=torch.float16, quantized_dtype=torch.int8)
    start = start_with(timer, lambda planned: done(), torch.device("cpu"), **options)
    tiles = sorted(set(candidates(key)), key=str)
    choose(monkeypatch, tiles[0], tiles[-1])
    assert dict(start(key)) == {tiles[0]: 7.0, tiles[-1]: 7.0}
    assert len(small_problems) == 1
    assert isinstance(key, TuningKey) or "norm" in key.kind or all(map(torch.equal, results[0], results[-1]))
    results.clear()
    choose(monkeypatch, tiles[0])
    begun = start(key)
    with monkeypatch.context() as patch:  # results of an earlier candidate do not count
        patch.setattr(launch.Launch, "run", lambda self: None)
        assert list(begun) == [(tiles[0], "wrong")]
    begun = start(key)
    expected = small_problems[-1].expected[-1]
    expected.copy_(expected + (expected.abs().max() if expected.is_floating_point() else 1))
    assert list(begun) == [(tiles[0], "wrong")]
    assert not results


def test_candidates_that_cannot_run_are_not_timed(small_problems, monkeypatch):
    tiles = [RowTile(64, 1), RowTile(128, 1), RowTile(256, 1)]
    choose(monkeypatch, *tiles)
    outcomes = iter(("compiled too long", None, None))
    spills = iter((17, 16))
    ran = []

    def run_one(planned):
        ran.append(planned.arguments["BLOCK"])
        return SimpleNamespace(n_spills=next(spills))

    monkeypatch.setattr(launch.Launch, "run", run_one)
    monkeypatch.setattr(tuning_inputs.Problem, "is_correct", lambda self: True)
    start = start_with(lambda run: 7.0, lambda planned: done(next(outcomes)), torch.device("cpu"), dtype=torch.float16)
    results = dict(start(RowTuningKey("swiglu", 256, 4)))
    assert results[tiles[0]] == "compiled too long"
    assert sorted(map(str, results.values())) == ["7.0", "compiled too long", "spilling"]
    assert 64 not in ran


def test_tiles_that_give_the_same_launch_are_timed_once(small_problems, monkeypatch):
    """A launch uses its smaller tile if the larger one would leave multiprocessors idle."""
    choose(monkeypatch, Tile(64, 32, 4, 2), Tile(128, 32, 4, 2), Tile(64, 32, 4, 3))
    submitted = []

    def compile_ahead(planned):
        submitted.append(planned)
        return done("not compilable")

    start = start_with(lambda run: 7.0, compile_ahead, torch.device("cpu"), dtype=torch.float16)
    assert {tile for tile, _ in start(TuningKey(16, 2, 16, False, 40))} == {Tile(64, 32, 4, 2), Tile(64, 32, 4, 3)}
    assert len(submitted) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run in the interpreter")
def test_tiles_with_a_producer_are_tuned(small_problems, monkeypatch):
    choose(monkeypatch, Tile(128, 64, 8, 3), Tile(128, 128, 4, 4, True), Tile(128, 64, 4, 4, True))
    monkeypatch.setattr(paged_attention, "device_of", lambda device: launch.Device("sm_90", 1))
    monkeypatch.setattr(tuning_inputs, "device_of", lambda device: launch.Device("sm_90", 1))
    submitted = []

    def compile_ahead(planned):
        submitted.append([one.kernel.__name__ for one in planned])
        return done("not compilable")

    start = start_with(lambda run: 7.0, compile_ahead, torch.device("cpu"), dtype=torch.float16)
    assert len(list(start(TuningKey(64, 2, 16, False, 512)))) == 3
    assert submitted == [["paged_attention_kernel"], *[["hopper_attention_kernel", "paged_attention_kernel"]] * 2]


def test_fastest_tile_is_written_with_gpu_and_time(tmp_path):
    file, lines = tmp_path / "sm_77.json", []

    def measure(key, tile):
        if isinstance(tile, RowTile):
            return abs(tile.elements - 512) + tile.num_warps / 100
        return "spilling" if tile.num_stages >= 4 else 10.0 - tile.num_stages + tile.block_n / 1000

    table = run(KEYS[:2], start_from(measure), file, show=lambda line, done=False: lines.append((line, done)))
    assert table == launch_table.read_table(file)
    assert json.loads(file.read_text())["measured"]["gpu"] == "A GPU"
    assert table.tiles == {KEYS[0]: Tile(64, 32, 4, 3), KEYS[1]: RowTile(512, 1)}
    assert table.times == {KEYS[0]: 7.03, KEYS[1]: 0.01}
    finished = [line for line, done in lines if done]
    assert len(finished) == 2
    assert finished[0].startswith("[1/2]") and "7.03 us" in finished[0] and "spilling" in finished[0]
    steps = sum(len(set(candidates(key))) for key in KEYS[:2])
    assert len(lines) == 2 + 2 + steps  # the beginning and the end of each point, and each candidate


def test_next_point_compiles_while_one_is_timed(tmp_path):
    started, when_timed = [], {}

    def measure(key, tile):
        when_timed[key] = list(started)
        return 1.0

    run(KEYS, start_from(measure, started), tmp_path / "sm_77.json")
    assert started == KEYS
    assert when_timed == {KEYS[0]: KEYS[:2], KEYS[1]: KEYS, KEYS[2]: KEYS}


def test_an_interrupted_run_keeps_its_points_and_continues(tmp_path):
    file, timed = tmp_path / "sm_77.json", []

    def interrupted(key, tile):
        if key == KEYS[1] and timed.count(KEYS[1]) == 3:
            raise KeyboardInterrupt
        timed.append(key)
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        run(KEYS, start_from(interrupted), file)
    assert list(launch_table.read_table(file).tiles) == KEYS[:1]
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    started, lines = [], []
    run(KEYS, start_from(lambda key, tile: 2.0, started), file, show=lambda line, done=False: lines.append(line))
    assert started == KEYS[1:]
    assert lines[0] == "1 of 3 points are in the table already"
    assert launch_table.read_table(file).times == {KEYS[0]: 1.0, KEYS[1]: 2.0, KEYS[2]: 2.0}
    started.clear()
    run(KEYS, start_from(lambda key, tile: 3.0, started), file)
    assert not started
    run(KEYS[:2], start_from(lambda key, tile: 3.0, started), file, fresh=True)
    assert launch_table.read_table(file).times == {KEYS[0]: 3.0, KEYS[1]: 3.0, KEYS[2]: 2.0}


@pytest.mark.parametrize("change", [{"gpu": "Another GPU"}, {"software": "torch 3, triton 4"}])
def test_times_of_another_gpu_or_software_are_replaced(change, tmp_path):
    file, started = tmp_path / "sm_77.json", []
    run(KEYS[:2], start_from(lambda key, tile: 1.0), file)
    other = Measurement(**(vars(MEASURED) | change))
    table = run(KEYS[1:], start_from(lambda key, tile: 2.0, started), file, measured=other)
    assert started == KEYS[1:]
    assert table == launch_table.read_table(file)
    assert table.measured == other
    assert table.times == {KEYS[1]: 2.0, KEYS[2]: 2.0}  # the entry of the other GPU stays, without a time
    assert list(launch_table.read_table(file).tiles) == [KEYS[0], KEYS[2], KEYS[1]]  # sorted


def test_point_without_a_candidate_that_runs_gets_no_entry(tmp_path):
    lines = []
    table = run(
        KEYS[:2],
        start_from(lambda key, tile: "compiled too long" if key == KEYS[0] else 1.0),
        tmp_path / "sm_77.json",
        show=lambda line, done=False: lines.append(line) if done else None,
    )
    assert list(table.tiles) == KEYS[1:2]
    assert "no candidate runs" in lines[0] and "compiled too long" in lines[0]


def test_tuning_keeps_other_entries(tmp_path):
    file, other = tmp_path / "sm_77.json", TuningKey(64, 2, 16, False, 1024)
    launch_table.write_table(launch_table.Table("sm_77", {other: Tile(64, 32, 2, 2)}), file)
    run(KEYS, start_from(lambda key, tile: 1.0), file)
    table = launch_table.read_table(file)
    assert table.tiles[other] == Tile(64, 32, 2, 2)
    assert set(table.times) == set(KEYS)


def test_progress_is_one_line_of_a_terminal(capsys, monkeypatch):
    print_progress("1 timed")
    print_progress("2 timed", done=True)
    assert capsys.readouterr().out == "2 timed\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_progress("1 timed")
    print_progress("2 timed", done=True)
    assert capsys.readouterr().out == "\r\x1b[K1 timed\r\x1b[K2 timed\n"


def points(**options):
    defaults = dict(model=None, quick=False, dtype="auto", kv_cache_dtype="auto")
    return points_of(SimpleNamespace(**(defaults | options)))


def test_points_of_a_model_follow_its_types(tmp_path):
    config = dict(
        model_type="llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000,
        intermediate_size=512, torch_dtype="float16",
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for options, dtypes, expected in (
        ({}, {"dtype": torch.float16}, (2, False)),
        ({"dtype": "float32"}, {"dtype": torch.float32}, (4, False)),
        ({"kv_cache_dtype": "int8"}, {"dtype": torch.float16, "quantized_dtype": torch.int8}, (2, True)),
    ):
        keys, problem_options = points(model=str(tmp_path), **options)
        assert problem_options == dtypes
        assert (keys[0].itemsize, keys[0].quantized) == expected
    assert points() == (tuning_keys(quick=False), {"dtype": torch.bfloat16})
    types = {"dtype": torch.float16, "quantized_dtype": torch.int8}
    assert points(quick=True, dtype="float16", kv_cache_dtype="int8") == (tuning_keys(quick=True), types)
    with pytest.raises(ValueError, match="dtype='float32': must be bfloat16 or float16 without a model"):
        points(dtype="float32")


def test_model_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"model='{tmp_path}': "):
        points(model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 0}')
    with pytest.raises(ValueError, match="vocab_size=0: must be a positive integer"):
        points(model=str(tmp_path))


@pytest.mark.nightly
def test_timing_compiles_nothing_that_a_process_has_compiled(compiled_environment, tmp_path):
    """Triton itself decides whether the code that a launch needs is in its cache."""
    script = tmp_path / "tune_without_a_gpu.py"
    script.write_text(TUNE_WITHOUT_A_GPU)
    environment = {**compiled_environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(script), str(tmp_path / "sm_90.json")]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["timed"] == 3
    assert {name for name, _ in report["loaded"]} >= {
        "paged_attention_kernel", "rope_kv_write_kernel", "best_kernel", "first_best_kernel",
    }  # fmt: skip
    assert all(hit for _, hit in report["loaded"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune on")
def test_tuner_without_a_gpu_exits_with_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(tuner.__file__, run_name="__main__")
    said = capsys.readouterr()
    assert (caught.value.code, said.out) == (2, "")
    assert "no GPU found" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--processes", "0"], "at least 1"), (["--model", "x", "--quick"], "not allowed with")],
)
def test_invalid_arguments_are_rejected(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        tuner.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
