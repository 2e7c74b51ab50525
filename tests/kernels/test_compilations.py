"""The count of kernels that are compiled while serving."""

import subprocess
import sys

import pytest

from paged_kernels.compilation import Compilations

COMPILE = """
import torch, triton
from unittest import mock
from triton.runtime import driver
from paged_kernels.compilation import Compilations
from paged_kernels.layer_ops import swiglu_kernel
from tests.support.fake_gpu import FakeDriver

compilations, rows = Compilations(), torch.empty(4, 64)
with mock.patch.object(driver, "_active", FakeDriver()):
    swiglu_kernel.warmup(rows, rows, 64, WIDTH=32, BLOCK=32, num_warps=1, grid=(1,))
    compilations.watch()
    for block in (32, 64, 64):
        swiglu_kernel.warmup(rows, rows, 64, WIDTH=32, BLOCK=block, num_warps=1, grid=(1,))
print(compilations.count)
"""


@pytest.fixture
def hook(monkeypatch):
    """Sets Triton's hook for compiled kernels, and returns a function that calls the present one."""
    from triton import knobs

    def install(value):
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", value)
        return lambda name: knobs.runtime.jit_post_compile_hook(repr=name)

    return install


def test_kernels_are_counted_and_named(hook, caplog):
    compiled, compilations = hook(None), Compilations()
    compilations.watch()
    compilations.watch()
    compiled("first_kernel[num_warps=4]")
    compiled("second_kernel")
    assert compilations.count == 2
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "first_kernel[num_warps=4]",
        "second_kernel",
    ]


def test_other_hooks_are_still_called(hook):
    names = []
    compiled, compilations = hook(lambda **details: names.append(details["repr"])), Compilations()
    compilations.watch()
    compiled("kernel")
    assert (names, compilations.count) == (["kernel"], 1)


@pytest.mark.nightly
def test_triton_reports_what_it_compiles(compiled_environment):
    """A variant that was compiled before, or a second time, does not count."""
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, env=compiled_environment, check=False)
    assert done.stdout.split() == ["1"], done.stderr
