"""The thread pool of the C++ kernels: a program of its own with random tasks, and the kernels themselves."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from paged_kernels.cpu import native
from paged_kernels.cpu.build import COMPILERS, SOURCES
from paged_kernels.cpu.packed_linear import pack_linear
from tests.support.waiting import until

COMPILER = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
TEST = Path(__file__).with_name("pool_stress.cpp")
COUNTS = re.compile(r"programs (\d+) repeats (\d+) discarded (\d+) wrong (\d+) child (\d+)")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
needs_kernels = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")


def build(directory, *flags):
    target = directory / "pool_stress"
    sources = [str(TEST), str(SOURCES / "pool.cpp")]
    command = [COMPILER, "-std=c++20", "-O1", "-pthread", f"-I{SOURCES}", *flags, *sources, "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def stress(program, *, programs, callers, threads, seed, **environment):
    command = [str(program), *map(str, (programs, callers, threads, seed))]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return dict(zip(("programs", "repeats", "discarded"), map(int, COUNTS.match(done.stdout).groups()), strict=False))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build(tmp_path_factory.mktemp("pool"))


@needs_compiler
@pytest.mark.parametrize(("callers", "threads"), [(1, 1), (1, 2), (1, 4), (3, 4)])
def test_delayed_threads_change_no_result(program, callers, threads, figures):
    """Each item is written once, from complete results of the task before, in a forked child too."""
    counts = stress(program, programs=400, callers=callers, threads=threads, seed=1)
    assert counts["programs"] == 400 * callers
    assert threads == 1 or counts["repeats"]
    figures(f"{counts}")


@needs_compiler
@pytest.mark.nightly
def test_thread_sanitizer_finds_no_race(tmp_path, figures):
    program = build(tmp_path, "-g", "-fsanitize=thread")
    for seed in range(20):
        options = {"TSAN_OPTIONS": "die_after_fork=0"}
        figures(f"{stress(program, programs=300, callers=1 + seed % 3, threads=4, seed=seed, **options)}")


@needs_kernels
@pytest.mark.parametrize("rows", [1, 5, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_layers_have_the_same_bits_on_any_number_of_threads(threads, dtype, rows):
    weight = pack_linear(torch.randn(200, 96).to(dtype))
    x = torch.randn(rows, 96).to(dtype)
    found = []
    for count in (1, 2, 5):
        threads(count)
        found += [native.linear(x, weight) for _ in range(20)]
    assert all(torch.equal(found[0], other) for other in found)


@needs_kernels
@pytest.mark.parametrize("count", [-1, 0, 1 << 31, 1 << 40])
def test_an_invalid_number_of_threads_is_rejected(threads, count):
    with pytest.raises(ValueError, match=rf"threads is {count}; it must be from 1 to 2147483647"):
        threads(count)


@needs_kernels
def test_programs_are_counted():
    before = native.pool_counts()
    native.swiglu(torch.randn(2, 8))
    assert native.pool_counts().programs > before.programs


@needs_kernels
def test_threads_sleep_between_programs(threads):
    """An idle process uses no CPU time."""
    threads(3)
    run_program()
    until(are_asleep, "sleeping threads")


@needs_kernels
def test_threads_without_work_are_not_woken(threads):
    threads(8)
    run_program()
    threads(2)
    run_program()
    until(are_asleep, "sleeping threads")
    before = pool_threads()
    assert len(before) >= 7
    for _ in range(20):
        run_program()
        until(are_asleep, "sleeping threads")
    assert sum(after.sleeps > before[thread].sleeps for thread, after in pool_threads().items()) <= 1


def run_program():
    native.linear(torch.randn(100, 640), pack_linear(torch.randn(640, 640)))


def are_asleep():
    return {thread.state for thread in pool_threads().values()} == {"S"}


class PoolThread(NamedTuple):
    state: str  # as the system names it: S is asleep
    sleeps: int  # how often it has gone to sleep


def pool_threads():
    """The threads of the pool, by thread id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):  # another thread, which has ended
            continue
        if fields["Name"] == "paged_cpu":
            found[task.name] = PoolThread(fields["State"][0], int(fields["voluntary_ctxt_switches"]))
    return found
