"""A quick run of each small benchmark."""

import pytest

from paged_bench import _machines, block_size, invariance, scoring
from paged_bench._harness import Contest
from paged_bench.layouts import Shape, all_reduced, layouts
from paged_bench.routing import Turn, hit_rate, recovery
from paged_client.cli import main
from paged_kernels.cpu import native
from tests.support.records import records_of

# --- lora -------------------------------------------------------------------------------------------------------------


def test_lora_benchmark(tiny, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--model", str(tiny[0]), "--rows", "4", "--adapters", "2", "--rounds", "1"]
    assert main(["bench", "lora", *arguments, "--json", str(file)]) == 0
    value = {name: record["value"] for name, record in records_of(file).items()}
    assert all(value[f"step of 4 rows, {number} adapters"] > 0 for number in (0, 1, 2))
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


# --- invariance -------------------------------------------------------------------------------------------------------


def test_invariance_benchmark(tiny, tmp_path, monkeypatch, capsys):
    used, load = [], invariance.load
    monkeypatch.setattr(invariance, "load", lambda options: used.append(options) or load(options))
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--model", str(tiny[0]), "--workload", "3x20/4", "--rounds", "2", "--json", str(file)]
    assert main(["bench", "invariance", *arguments]) == 0
    assert "round 2 of 2: batch_invariant" in capsys.readouterr().err
    assert [options["batch_invariant"] for options in used] == [False, True]
    records = records_of(file)
    assert records["3x20/4, default"]["value"] > 0
    for name in ("batch_invariant / default", "batch_invariant / default, CPU time"):
        assert records[f"3x20/4, {name}"]["target"] == 0.95
    assert file.with_suffix(".png").stat().st_size


# --- scoring ----------------------------------------------------------------------------------------------------------


ARGUMENTS = ["--quick", "--tokens", "96", "--length", "4", "--continuations", "5", "--rounds", "2"]


def test_scoring_benchmark(tiny, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert main(["bench", "scoring", "--model", str(tiny[0]), *ARGUMENTS, "--json", str(file)]) == 0
    assert "round 2 of 2: computed" in capsys.readouterr().err
    records, what = records_of(file), "5 continuations of 96 tokens"
    assert records[f"{what}, cached"]["value"] > 0 and records[f"{what}, computed"]["value"] > 0
    assert records[f"{what}, cached / computed"]["target"] == 5
    differing = records["log probabilities that differ"]
    assert (differing["value"], differing["unit"]) == (0, "of 990")
    assert file.with_suffix(".png").stat().st_size


def test_only_continuations_are_computed(tiny, tmp_path, monkeypatch, capsys):
    """The cached engine computes the prompt once, the other one for each request."""
    computed = {}

    def counting(assembly, prompts):
        before = assembly.scheduler.stats
        found = score(assembly, prompts)
        after = assembly.scheduler.stats
        hits = after.cached_tokens - before.cached_tokens
        computed[assembly.scheduler.blocks.caching] = after.queried_tokens - before.queried_tokens - hits
        return found

    score = scoring.score
    monkeypatch.setattr(scoring, "score", counting)
    assert main(["bench", "scoring", "--model", str(tiny[0]), *ARGUMENTS, "--max-num-seqs", "1"]) == 0
    assert computed == {True: 100 + 4 * 5, False: 500}


# --- speculation ------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_speculation_benchmark(tiny, tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--quick", "--length", "20", "--output", "12", "--draft-tokens", "3"]
    assert main(["bench", "speculation", *arguments, "--draft", str(tiny[0]), "--json", str(file)]) == 0
    assert "round 1 of 1: none" in capsys.readouterr().err
    value = {name: record["value"] for name, record in records_of(file).items()}
    for kind in ("repeating a text", "going on with one"):
        assert value[f"{kind}: accepted (draft model, 3)"] > 95  # the model is its own draft model
        assert value[f"{kind}: tokens_per_step (draft model, 3)"] > 3
        assert value[f"{kind}: throughput_ratio (prompt lookup, 3)"] > 0


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
def test_experts_benchmark(tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--shape", "8x2x64x32", "--rows", "1", "--rows", "5", "--rounds", "1", "--dtype", "float32"]
    assert main(["bench", "experts", *arguments, "--json", str(file)]) == 0
    value = {name: record["value"] for name, record in records_of(file).items()}
    for rows in (1, 5):
        for name in ("packed", "int8", "int4", "transformers, grouped_mm", "transformers, loop over experts"):
            assert value[f"{rows} rows, {name}"] > 0
        errors = [value[f"{rows} rows, error of {name}"] for name in ("packed", "int8", "int4")]
        assert errors[0] < 1e-5 < errors[1] < 0.05 and errors[1] < errors[2] < 0.3
        assert value[f"{rows} rows, speed of packed over transformers"] > 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("shape", ["8x2x64", "8xax64x32", "0x2x64x32", "2x3x64x32"])
def test_invalid_shapes(shape, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "experts", "--shape", shape])
    assert shape in capsys.readouterr().err


# --- kv dtype ---------------------------------------------------------------------------------------------------------


def test_window_longer_than_the_context_is_rejected(tiny, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "kv_dtype", "--quick", "--model", str(tiny[0]), "--length", "100000"])
    assert "argument --length: 100000: must be at most" in capsys.readouterr().err


@pytest.mark.nightly
def test_kv_dtype_benchmark(tiny, tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--quick", "--windows", "2", "--length", "40", "--json", str(file)]
    assert main(["bench", "kv_dtype", *arguments]) == 0
    assert "2 windows of 40 tokens" in capsys.readouterr().out
    value = {name: record["value"] for name, record in records_of(file).items()}
    assert [value[f"bytes per token {kind}"] for kind in ("auto", "fp8", "int8")] == [12 * 64, 12 * 20, 12 * 20]
    assert value["KL divergence auto"] == 0
    assert 0 < value["KL divergence int8"] < value["KL divergence fp8"]
    assert value["same top token auto"] == 100


# --- nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.skipif(not _machines.available(), reason=_machines.MISSING)
def test_nodes_benchmark(tmp_path):
    file = tmp_path / "figures.json"
    assert main(["bench", "nodes", "--quick", "--json", str(file)]) == 0
    records = records_of(file)
    moved = records["bytes of one of 3 machines"]
    assert moved["limit"] < moved["value"] < 3 * moved["limit"]
    assert records["output, 16 streams on 3 machines"]["value"] > 0
    assert records["end of a request after a link was cut"]["value"] > 0


@pytest.mark.nightly
@pytest.mark.skipif(not _machines.available(), reason=_machines.MISSING)
def test_nodes_benchmark_of_stages(tmp_path):
    """Stages exchange far fewer bytes than ranks that share each layer."""
    file, stages = tmp_path / "figures.json", ["--nodes", "2", "--pipeline-parallel-size", "2"]
    assert main(["bench", "nodes", "--quick", *stages, "--json", str(file)]) == 0
    moved = records_of(file)["bytes of one of 2 machines in 2 stages"]
    assert moved["limit"] < moved["value"] < 3 * moved["limit"] < 100_000


def test_machines_that_stages_do_not_divide_are_rejected(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "nodes", "--nodes", "3", "--pipeline-parallel-size", "2"])
    assert "--pipeline-parallel-size 2: must divide 3, the number of machines" in capsys.readouterr().err


def test_missing_namespaces_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(_machines, "available", lambda: False)
    file = tmp_path / "figures.json"
    assert main(["bench", "nodes", "--quick", "--json", str(file)]) == 0
    assert "network namespaces need root" in records_of(file)["output on several machines"]["unit"]


# --- routing ----------------------------------------------------------------------------------------------------------


def run(file, *arguments):
    assert main(["bench", "routing", "--quick", *arguments, "--json", str(file)]) == 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return {name: record["value"] for name, record in records_of(file).items()}


@pytest.mark.nightly
def test_conversations_over_two_servers(tmp_path):
    value = run(tmp_path / "figures.json", "--routing", "kv", "--routing", "sessions")
    for routing in ("kv", "sessions"):
        assert 0 < value[f"hit rate, {routing}"] <= 100
        assert value[f"hit rate over one server, {routing}"] > 0.5
        assert 1 <= value[f"load of the busiest server over the mean, {routing}"] < 2
        assert value[f"failed requests, {routing}"] == 0


@pytest.mark.nightly
def test_loss_of_a_server(tmp_path):
    value = run(tmp_path / "figures.json", "--part", "loss", "--routing", "kv", "--reply-tokens", "64")
    (lost,) = [figure for name, figure in value.items() if name.startswith("requests without an answer of ")]
    assert (lost, value["cut streams with the loss of a server, kv"]) == (0, 0)


@pytest.mark.nightly
def test_overhead(tmp_path):
    value = run(tmp_path / "figures.json", "--part", "overhead")
    assert value["throughput with routing, events, metrics and traces"] > 0


def turns(*hits):
    """Return turns with 10 prompt tokens in each second, of which so many are cached."""
    return [Turn(second + 0.5, 10, cached) for second, cached in enumerate(hits)]


def test_recovery_is_the_end_of_the_last_window_below_the_share():
    assert hit_rate(turns(5, 10)) == 0.75
    assert recovery(turns(8, 8, 2, 8, 4, 8, 8, 8), 2.0, 0.95, 1.0) == 3.0
    assert recovery(turns(8, 8, 8, 8, 8), 2.0, 0.95, 1.0) == 0.0
    assert recovery(turns(8, 8, 2, 2, 2), 2.0, 0.95, 1.0) is None


# --- block size -------------------------------------------------------------------------------------------------------


def test_block_size_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(block_size, "CONTEXT", 128)
    monkeypatch.setattr(block_size, "WEIGHT", (256, 256))
    monkeypatch.setattr(block_size, "MEMORY", 1 << 24)
    file = tmp_path / "figures.json"
    assert main(["bench", "block_size", "--quick", "--rounds", "1", "--json", str(file)]) == 0
    value = {name: record["value"] for name, record in records_of(file).items()}
    for name in ("decode, heads", "decode, latents", "prefill", "bookkeeping", "waste, Gemma 3 27B"):
        assert all(value[f"{name}, block_size={size}"] > 0 for size in (8, 16, 32, 64, 128))
    assert value["linear layer, weights"] > 0
    assert value["waste, DeepSeek V3, block_size=8"] < value["waste, DeepSeek V3, block_size=128"]
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_block_sizes_are_compared_in_quiet_rounds():
    times = {"a": [9.0, 1.0, 2.0, 9.0], "b": [1.0, 3.0, 4.0, 8.0]}
    records = block_size.quiet_rounds(Contest({}, times, {}), "{}, time", "s", lambda time: 10 * time)
    assert [(record.name, record.value) for record in records] == [("a, time", 10), ("b, time", 30)]


# --- layouts -------------------------------------------------------------------------------------------------------


SHAPE = Shape(layers=2, hidden=8, kv_width=4, vocab=32, parameters=1000)


def test_costs_are_those_counted_by_hand():
    costs = layouts(SHAPE, machines=2, rows=3, prompt=10)
    # Two machines exchange half of each sum in both phases of an all-reduce: 8 elements of 2 bytes for each row, once
    # for the embeddings and twice in each layer.
    assert all_reduced(SHAPE, rows=1, machines=2) == 16 * 5
    tensor = costs["tensor parallel"]
    assert tensor.step == 3 * 16 * 5 + 3 * 32  # the logits of half of the vocabulary, in 2 bytes
    assert (tensor.weights, tensor.messages, tensor.prompt) == (1000, 6, 10 * 16 * 5)
    pipeline = costs["pipeline parallel"]
    assert (pipeline.weights, pipeline.step, pipeline.messages, pipeline.prompt) == (1000, 3 * 16, 2, 10 * 16)
    servers = costs["prefill and decode servers"]
    assert (servers.weights, servers.step, servers.prompt) == (2000, 0, 10 * 2 * 4 * 2)
    assert costs["independent servers"].prompt == 0


def test_more_machines_move_more_with_tensor_parallelism_only():
    two, four = (layouts(SHAPE, machines, rows=1, prompt=1) for machines in (2, 4))
    assert four["tensor parallel"].step > two["tensor parallel"].step
    assert four["pipeline parallel"].step == two["pipeline parallel"].step


def test_network_time_has_bandwidth_and_latency(tmp_path):
    file = tmp_path / "figures.json"
    command = ["bench", "layouts", "--model", "tiny", "--rows", "1", "--json", str(file)]
    assert main([*command, "--gbits", "0.001", "--latency-us", "1"]) == 0
    moved = records_of(file)["moved in a decode step, tensor parallel"]["value"]
    slow = records_of(file)["network time of a decode step, tensor parallel"]["value"]
    assert slow == pytest.approx(moved * 8e3, rel=0.01)  # MB at 1 Mbit/s, in ms
    assert main([*command, "--gbits", "1000", "--latency-us", "1e6"]) == 0
    late = records_of(file)["network time of a decode step, pipeline parallel"]["value"]
    assert late == pytest.approx(2e3, rel=0.01)  # to the second machine and back
    assert file.with_suffix(".png").stat().st_size > 1000
