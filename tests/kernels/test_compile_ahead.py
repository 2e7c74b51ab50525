"""Compilation ahead of launches, for a GPU that need not exist."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from paged_kernels.attention_plan import Choice, count_splits, force
from paged_kernels.compilation import compile_ahead
from paged_kernels.launch import Launch, intercept_launches, own_counters, zeros

SCRIPT = """
import sys
import torch
import triton
import triton.language as tl
from triton.runtime import driver
from paged_kernels.compilation import compile_launches
from paged_kernels.launch import Device, Launch
from paged_kernels.layer_ops import plan_swiglu
from tests.support.fake_gpu import FakeDriver

driver.set_active(FakeDriver())

@triton.jit
def broken_kernel(out, N: tl.constexpr):
    tl.store(out, tl.arange(0, N))  # N is no power of two

outputs = [torch.ones(4, n) for n in (64, 128, 64)]
inputs = [torch.ones(4, 2 * out.shape[1]) for out in outputs]
broken = Launch(broken_kernel, (1,), {"out": outputs[0], "N": 3})

def run():
    broken.run()
    for out, gate_up in zip(outputs, inputs):
        plan_swiglu(out, gate_up, device=Device("xpu", 1)).run()

totals, advanced = [], []
def start_progress(total):
    totals.append(total)
    return lambda: advanced.append(total)

print(compile_launches(run, start_progress), totals, len(advanced), {float(out.abs().max()) for out in outputs})
kernel = plan_swiglu(outputs[0], inputs[0], device=Device("xpu", 1)).kernel
print({type(one).__name__ for one in kernel.device_caches[0][0].values()}, len(kernel.device_caches[0][0]))
print(compile_launches(lambda: [plan_swiglu(outputs[0], inputs[0], device=Device("xpu", 1)).run()]))
try:
    broken.kernel.warmup(**broken.arguments, grid=(1,)).result()
except triton.CompilationError:
    print("broken")
"""


class Kernel:
    def __getitem__(self, grid):
        return lambda **arguments: (grid, arguments)


@pytest.fixture
def run_apart():
    """Run a function in another thread, and return its result."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result()


def test_kernels_are_compiled_and_errors_wait_for_the_launch(compiled_environment, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**compiled_environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert ended.stdout.splitlines() == ["3 [3] 3 {0.0}", "{'CompiledKernel'} 2", "0", "broken"], ended.stderr
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 2


def test_nothing_runs_without_a_gpu():
    def fail():
        raise AssertionError("must not run")

    assert compile_ahead(torch.device("cpu"), fail) == 0


def test_launches_are_intercepted_until_the_end_of_the_context():
    launch, taken = Launch(Kernel(), (3,), {"x": 1}), []
    results = []

    def fail(_):
        taken.append(launch)
        raise KeyError

    with intercept_launches(taken.append):
        results.append(launch.run())
    with pytest.raises(KeyError), intercept_launches(fail):
        launch.run()
    assert (taken, results) == ([launch, launch], [None])
    assert launch.run() == ((3,), {"x": 1})


def test_launches_of_other_threads_run_while_those_of_one_are_intercepted(run_apart):
    with intercept_launches(lambda launch: None), force(Choice(splits=2, small_tiles=False)):
        assert run_apart(Launch(Kernel(), (3,), {"x": 1}).run) == ((3,), {"x": 1})
        assert (count_splits(1, 16, 132), run_apart(lambda: count_splits(1, 16, 132))) == (2, 1)


def test_graphs_of_two_engines_do_not_share_counters():
    device, first, second = torch.device("cpu"), {}, {}
    shared = zeros(8, device)
    with own_counters(first):
        counters = zeros(8, device)
        with own_counters(second):
            assert zeros(8, device) is not counters
        assert zeros(4, device) is counters
    assert zeros(8, device) is shared is not counters
