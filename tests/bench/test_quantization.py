"""The benchmark of quantized weights."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from paged_bench import quantization
from paged_bench._engine import Run, run_paged
from paged_bench.quantization import ATTEMPTS, MAX_LOAD, LoadedRun, least_disturbed, other_cpu_seconds
from paged_client.cli import main
from paged_kernels.cpu import native
from tests.support.in_process import tiny_assembly
from tests.support.records import records_of
from tests.support.waiting import until

# --- disturbance ------------------------------------------------------------------------------------------------------


def with_loads(monkeypatch, loads):
    """Make each run take a second, during which other processes use so many cores."""
    times, used = iter(range(100)), [0.0]
    for load in loads:
        used += [used[-1] + load] * 2
    readings = iter(used)
    monkeypatch.setattr(quantization.time, "monotonic", lambda: float(next(times)))
    monkeypatch.setattr(quantization, "other_cpu_seconds", lambda child: next(readings))


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([0.1], (1, 0.1)),
        ([1.5, MAX_LOAD], (2, MAX_LOAD)),
        ([1.5, 0.5, 1.0], (2, 0.5)),  # the least of all attempts
    ],
)
def test_disturbed_runs_are_repeated(loads, expected, monkeypatch):
    assert len(loads) <= ATTEMPTS
    with_loads(monkeypatch, loads)
    numbers = iter(range(1, 10))
    found = least_disturbed(lambda: next(numbers))
    assert (found.run, found.load) == (expected[0], pytest.approx(expected[1]))
    assert next(numbers) == len(loads) + 1


def test_a_system_that_does_not_tell_counts_as_idle(monkeypatch):
    monkeypatch.setattr(quantization, "other_cpu_seconds", lambda child: None)
    assert least_disturbed(lambda: "result") == LoadedRun("result", 0.0)


def test_time_of_a_process_that_does_not_exist_is_unknown():
    assert other_cpu_seconds(2**30) is None


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="only on Linux")
def test_time_of_other_processes_is_known_on_linux():
    """The time of a process of our own is not counted."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            until(lambda: cpu_seconds(child.pid) > 0.3)
            without_child = other_cpu_seconds(child.pid)
            assert other_cpu_seconds(None) - without_child > 0.2
        finally:
            child.kill()


def cpu_seconds(process):
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- quantization -----------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="needs AVX512-VNNI")
def test_quantization_benchmark(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("paged_backend.models.linear.MIN_ELEMENTS", 0)
    file, formats = tmp_path / "figures.json", ["bfloat16", "int8", "AWQ", "FP8 channel"]
    arguments = ["--quick", "--model", str(tiny[0]), "--windows", "2", "--length", "40", "--json", str(file)]
    before = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    assert main(["bench", "quantization", *arguments, "--threads", "1", "--formats", ",".join(formats)]) == 0
    assert (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")) == before
    value = {name: record["value"] for name, record in records_of(file).items()}
    assert value["KL divergence float32"] == 0
    for name in formats[1:]:
        assert 0 < value["KL divergence bfloat16"] < value[f"KL divergence {name}"]
        assert value[f"1 stream {name}"] > 0 and value[f"8 streams {name}"] > 0
    assert value["same top token float32"] == 100
    shares = [f"1 stream {name}: share of the memory bandwidth" for name in formats]
    shares += [f"step of 16 {name}: share of the multiply rate" for name in formats]
    assert all(0 < value[share] < 120 for share in shares)
    assert value["step of 16 int8"] > 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_windows_and_rounds_are_reduced_to_keep_the_time(tiny, monkeypatch, capsys):
    monkeypatch.setattr(quantization, "ATTEMPTS", 1)
    monkeypatch.setattr(quantization, "OUTPUT", 4)
    arguments = ["--model", str(tiny[0]), "--quick", "--formats", "bfloat16", "--length", "40", "--threads", "1"]
    assert main(["bench", "quantization", *arguments, "--windows", "8", "--rounds", "3", "--minutes", "0.001"]) == 0
    shown = capsys.readouterr()
    assert "windows of 40 tokens" in shown.out and "8 windows" not in shown.out
    assert "1 of 3 rounds fit into 0 s" in shown.err


def test_streams_are_compared_with_llama_cpp(tiny):
    """A second contestant with the same outputs takes the place of llama.cpp."""
    run = partial(run_paged, assembly := tiny_assembly(tiny[0], enable_prefix_caching=False))
    records = quantization.speed({"GGUF Q4_0": assembly}, {"GGUF Q4_0": run}, streams=1, rounds=2, on=None)
    found = {record.name: record for record in records}
    assert list(found) == [
        "1 stream: runs beside other processes",
        "1 stream GGUF Q4_0",
        "1 stream GGUF Q4_0: times llama.cpp",
        "1 stream GGUF Q4_0: tokens as llama.cpp",
        "1 stream GGUF Q4_0: share of the memory bandwidth",
    ]
    assert found["1 stream GGUF Q4_0"].peers["llama.cpp"] > 0
    assert found["1 stream GGUF Q4_0: times llama.cpp"].target == 1.0
    assert found["1 stream GGUF Q4_0: tokens as llama.cpp"].value == 100


def test_tokens_count_up_to_the_first_difference():
    ours = [Run(1.0, 2, outputs=[[1, 2, 3, 4], [5, 6, 7, 8]])]
    theirs = [Run(1.0, 2, outputs=[[1, 2, 9, 4], [5, 6, 7, 8]])]
    assert quantization.same_tokens(ours, theirs) == 6 / 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "Q3"], "'Q3': must be one of float32; bfloat16"),
        (["--minutes", "0"], "'0': must be a number above 0"),
        (["--peers", "vllm"], "'vllm': must be \"llama.cpp\" or \"none\""),
        (["--formats", "GGUF Q4_0"], "GGUF Q4_0: only the demo model is available as a GGUF file"),
        (["--quick", "--length", "300"], "argument --length: 300: must be at most 256"),
    ],
)  # fmt: skip
def test_invalid_arguments(tiny, arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "quantization", "--model", str(tiny[0]), *arguments])
    assert message in capsys.readouterr().err


def test_formats_whose_names_have_commas():
    assert quantization.names("int4, groups of 128,AWQ, int4") == ["int4, groups of 128", "AWQ", "int4"]
