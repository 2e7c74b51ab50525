"""The limits of the machine, and the shares of them that an engine reaches. Times are not checked."""

import pytest
import torch

from paged_bench import cpu, kernels
from paged_bench._engine import Job
from paged_bench._harness import Record
from paged_bench._limits import Machine, cpu_limits, factor_type, prompt_flops, step_bytes
from paged_bench.cpu import Scenario, output_rate, prompt_rate, shares, step_ms
from paged_client.cli import main
from paged_kernels.cpu import native
from tests.support.in_process import tiny_assembly

CPU = torch.device("cpu")
LINEARS = 3 * (64 * 64 + 64 * 64 + 64 * 64 + 3 * 64 * 96)  # elements of a tiny model: qkv, output, gate, up and down

# --- measurement ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", native.levels() or ["plain"])
def test_every_level_is_measured(level, monkeypatch):
    monkeypatch.setenv(native.LEVEL, level)
    machine, records = cpu_limits(2)
    assert machine.read > 0
    float32, bfloat16, int8 = machine.flops.values()
    assert 0 < float32 <= min(bfloat16, int8)
    assert [(record.name, record.unit) for record in records] == [
        ("memory bandwidth", "GB/s"),
        ("multiply rate, float32", "GFLOP/s"),
        ("multiply rate, bfloat16", "GFLOP/s"),
        ("multiply rate, int8", "GFLOP/s"),
    ]
    assert all(record.peers["1 thread"] > 0 for record in records)


def test_limits_need_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-compiler")
    machine, records = cpu_limits(2)
    assert machine is None
    reason = "not measured: no C++ compiler: none of no-compiler is on PATH"
    assert [(record.name, record.unit) for record in records] == [
        ("memory bandwidth", reason),
        ("multiply rate", reason),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no compiler")
def test_kernels_are_not_measured_without_limits(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-compiler")
    assert main(["bench", kernels.main.name, "--quick"]) == 0
    assert "memory bandwidth: not measured: no C++ compiler" in capsys.readouterr().out


# --- the work of a model ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
@pytest.mark.parametrize(
    ("options", "bits", "multiplied"),
    [
        ({"dtype": "float32"}, 32, torch.float32),
        ({"dtype": "bfloat16"}, 16, torch.bfloat16),
        ({"dtype": "bfloat16", "quantization": "int8"}, 8 + 16 / 64, torch.int8),
    ],
)
def test_bytes_of_a_step_are_those_in_memory(options, bits, multiplied, tiny, monkeypatch):
    monkeypatch.setattr("paged_backend.models.linear.MIN_ELEMENTS", 0)
    assembly = tiny_assembly(tiny[0], **options)
    found = step_bytes(assembly, [Job([1] * 20, 8), Job([1] * 10, 4)])
    size = assembly.loaded.spec.dtype.itemsize
    # int8 has a scale in 16 bits for each output: of 64 inputs, or of 96 in one of the layers
    expected = (LINEARS + 320 * 64) * bits / 8 + 7 * 64 * size
    assert found["weights"] == pytest.approx(expected, rel=0.03)
    assert found["keys and values"] == (20 + 4 + 10 + 2) * 3 * 2 * 2 * 16 * size
    assert factor_type(assembly) == multiplied
    assembly.close()


def test_operations_of_a_prompt(tiny):
    assembly = tiny_assembly(tiny[0])
    attention = 3 * 4 * (16 + 16) * (1 + 2 + 3)  # layers, heads, key and value, and the positions before
    assert prompt_flops(assembly, 3) == 2 * (3 * LINEARS + attention)
    assembly.close()


# --- shares -----------------------------------------------------------------------------------------------------------


def test_shares_of_all_contestants(tiny):
    assembly = tiny_assembly(tiny[0])
    jobs, machine = [Job([1] * 20, 8)], Machine(CPU, 1e9, {torch.float32: 1e12})
    step = Scenario("step", jobs, step_ms, "ms", {})
    (found,) = shares(step, Record("step", 2.0, "ms", peers={"vLLM": 4.0}), assembly, machine)
    expected = 100 * sum(step_bytes(assembly, jobs).values()) / 2e-3 / 1e9
    assert (found.name, found.unit, found.limit) == ("step: share of the memory bandwidth", "%", 100.0)
    assert (found.value, found.peers["vLLM"]) == pytest.approx((expected, expected / 2))
    prompts = Scenario("prompts", jobs, prompt_rate, "tokens/s", {})
    (found,) = shares(prompts, Record("prompts", 1e6, "tokens/s"), assembly, machine)
    assert (found.name, found.peers) == ("prompts: share of the multiply rate", {})
    assert found.value == pytest.approx(100 * 1e6 * prompt_flops(assembly, 20) / 20 / 1e12)
    assert not list(
        shares(Scenario("all", jobs, output_rate, "tokens/s", {}), Record("all", 1.0, "x"), assembly, machine)
    )
    (found,) = shares(step, Record("step", 2.0, "ms"), assembly, None)
    assert (found.value, found.unit) == (None, "not measured: the memory bandwidth is not known")
    assembly.close()


def test_shares_are_drawn():
    records = [
        Record("step: share of the memory bandwidth", 50.0, "%", limit=100.0, peers={"vLLM": 40.0}),
        Record("step: same as vLLM", 70.0, "% of requests"),
    ]
    (panel,) = (one for one in cpu.panels(records) if "limit" in one.title)
    assert dict(panel.values) == {
        "step: share of the memory bandwidth": 50.0,
        "step: share of the memory bandwidth, vLLM": 40.0,
    }
    assert panel.grey == {"step: share of the memory bandwidth, vLLM"}
