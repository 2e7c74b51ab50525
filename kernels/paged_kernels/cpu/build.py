"""Compiles the CPU's kernels, one object for each level of instructions: `python -m paged_kernels.cpu.build`.

A level that the compiler does not know is left out, and said. The result lies in `built/`, named after what it was
made of, so that one of other sources or for another torch is never loaded.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parent / "built"
COMPILERS = ("g++", "clang++")  # the first that is there, or what CXX says
FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wno-psabi".split()
TORCH_ABI = "0x020b000000000000"  # of 2.11: the oldest torch that pyproject.toml allows

_AVX2 = "-mavx2 -mfma -mf16c"
_AVX512 = f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"
# Best first. The last one is for tests: what tile instructions do, in plain C++.
LEVELS = {
    "x86_64": {
        "amx": f"{_AVX512} -mavx512bf16 -mamx-tile -mamx-bf16",
        "avx512": _AVX512,
        "avx2": _AVX2,
    }
}.get(platform.machine(), {}) | {"plain": "", "amx_emulated": "-DPAGED_EMULATE_AMX=1"}
# Levels whose linear layers are those of another: only their attention has instructions of its own.
LINEAR = {"amx": "avx512", "amx_emulated": "plain"}


class BuildFailed(Exception):
    """No compiler, or one that could not; the message says which and what it said."""


def library() -> Path:
    """Where the library of these sources and this torch is, or would be."""
    made_of = hashlib.sha256(repr((FLAGS, LEVELS, TORCH_ABI, torch.__version__, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        made_of.update(source.name.encode() + source.read_bytes())
    return BUILT / f"paged_cpu-{made_of.hexdigest()[:16]}.so"


def build() -> tuple[Path, list[str]]:
    """The library, and what was left out of it. Raises BuildFailed."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None or shutil.which(compiler) is None:
        raise BuildFailed(f"no C++ compiler: none of {', '.join([compiler] if compiler else COMPILERS)} is on PATH")
    target = library()  # of the sources as they are now
    BUILT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        place = Path(folder)
        binding = pool.submit(_compile, compiler, "binding.cpp", place / "binding.o", _torch_flags())
        jobs = {}
        for name, flags in LEVELS.items():
            level = [*flags.split(), f"-DPAGED_LEVEL={name}", f"-DPAGED_LINEAR={LINEAR.get(name, name)}"]
            sources = ["linear.cpp", "level.cpp"][name in LINEAR :]
            jobs[name] = [pool.submit(_compile, compiler, one, place / f"{name}-{one}.o", level) for one in sources]
        objects, built, left_out = [binding.result()], list[str](), []
        for name in sorted(LEVELS, key=LINEAR.__contains__):
            try:
                made = [job.result() for job in jobs[name]]
                if LINEAR.get(name, name) not in [*built, name]:
                    raise BuildFailed(f"needs {LINEAR[name]}")
            except BuildFailed as error:
                if name == "plain":
                    raise
                left_out.append(f"{name}: {error}")
                continue
            objects += made
            built.append(name)
        names = " ".join(f"LEVEL({one})" for one in LEVELS if one in built)
        objects.append(_compile(compiler, "schedule.cpp", place / "schedule.o", [f"-DPAGED_LEVELS={names}"]))
        _run([compiler, "-shared", "-o", str(place / "whole.so"), *map(str, objects), *_libraries()])
        os.replace(place / "whole.so", target)
    return target, left_out


def _compile(compiler: str, source: str, target: Path, flags: Sequence[str]) -> Path:
    _run([compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(target)])
    return target


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildFailed(f"{command[0]} gave {done.returncode}: {said[0] if said else 'nothing'}")


def _torch_flags() -> list[str]:
    root = Path(torch.__file__).parent / "include"
    return [f"-I{root}", f"-I{root / 'torch/csrc/api/include'}", f"-DTORCH_TARGET_VERSION={TORCH_ABI}"]


def _libraries() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]


def main() -> int:
    if library().exists():
        return 0
    print("Compiling the CPU's kernels: about a minute of one core", flush=True)
    started = time.monotonic()
    try:
        made, left_out = build()
    except (BuildFailed, OSError) as error:
        print(f"The CPU's kernels were not compiled, and PyTorch's serve, slower: {error}", file=sys.stderr)
        return 1
    for one in left_out:
        print(f"Left out {one}")
    for other in BUILT.glob("paged_cpu-*.so"):
        if other != made:
            other.unlink()
    print(f"Compiled in {time.monotonic() - started:.0f} s: {made}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
