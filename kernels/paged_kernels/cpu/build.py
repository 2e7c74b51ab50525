"""The build of the C++ kernels, with one object per instruction set: `python -m paged_kernels.cpu.build`.

A level that the compiler does not support is skipped with a message. The library in `built/` is named after a hash of
its sources, flags and torch version, so that a stale one is never loaded.
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
COMPILERS = ("g++", "clang++")  # compilers in order of preference, unless CXX is set
FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wno-psabi".split()
TORCH_ABI = "0x020b000000000000"  # torch 2.11, the oldest that pyproject.toml allows

_AVX2 = "-mavx2 -mfma -mf16c"
_AVX512 = f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"
# Levels, the best first. The last one emulates tile instructions in plain C++, for tests.
LEVELS = {
    "x86_64": {
        "amx": f"{_AVX512} -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16",
        "avx512_bf16": f"{_AVX512} -mavx512vnni -mavx512bf16",
        "avx512_vnni": f"{_AVX512} -mavx512vnni",
        "avx512": _AVX512,
        "avx2": _AVX2,
    }
}.get(platform.machine(), {}) | {"plain": "", "amx_emulated": "-DPAGED_EMULATE_AMX=1"}
TORCH_SOURCES = ("binding.cpp", "decoder.cpp", "experts.cpp")
PLAIN_SOURCES = ("pool.cpp", "tasks.cpp")
# Levels that differ from another level in attention only, and use its linear layers.
LINEAR = {"amx": "avx512_bf16"}


class BuildFailed(Exception):
    """There is no compiler, or it failed. The message has the command and its error."""


def library() -> Path:
    """Return the path of the library for these sources and this torch, built or not."""
    digest = hashlib.sha256(repr((FLAGS, LEVELS, TORCH_ABI, torch.__version__, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return BUILT / f"paged_cpu-{digest.hexdigest()[:16]}.so"


def build() -> tuple[Path, list[str]]:
    """Compile the library. Returns its path and why levels were skipped. Raises BuildFailed."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None or shutil.which(compiler) is None:
        raise BuildFailed(f"no C++ compiler: none of {', '.join([compiler] if compiler else COMPILERS)} is on PATH")
    target = library()  # hash of the sources before compiling
    BUILT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        place = Path(folder)
        common = [
            pool.submit(_compile, compiler, source, place / f"{source}.o", flags)
            for source, flags in (
                *((one, _torch_flags()) for one in TORCH_SOURCES),
                *((one, []) for one in PLAIN_SOURCES),
            )
        ]
        jobs = {}
        for name, flags in LEVELS.items():
            level = [*flags.split(), f"-DPAGED_LEVEL={name}", f"-DPAGED_LINEAR={LINEAR.get(name, name)}"]
            sources = ["linear.cpp", "level.cpp"][name in LINEAR :]
            jobs[name] = [pool.submit(_compile, compiler, one, place / f"{name}-{one}.o", level) for one in sources]
        objects, built, skipped = [job.result() for job in common], list[str](), list[str]()
        for name in sorted(LEVELS, key=LINEAR.__contains__):
            try:
                made = [job.result() for job in jobs[name]]
                if LINEAR.get(name, name) not in [*built, name]:
                    raise BuildFailed(f"needs {LINEAR[name]}")
            except BuildFailed as error:
                if name == "plain":
                    raise
                skipped.append(f"{name}: {error}")
                continue
            objects += made
            built.append(name)
        names = " ".join(f"LEVEL({one})" for one in LEVELS if one in built)
        objects.append(_compile(compiler, "levels.cpp", place / "levels.o", [f"-DPAGED_LEVELS={names}"]))
        _run([compiler, "-shared", "-o", str(place / "whole.so"), *map(str, objects), *_libraries(), "-pthread"])
        os.replace(place / "whole.so", target)
    return target, skipped


def _compile(compiler: str, source: str, target: Path, flags: Sequence[str]) -> Path:
    _run([compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(target)])
    return target


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildFailed(f"{command[0]} exited with {done.returncode}: {errors[0] if errors else 'no output'}")


def _torch_flags() -> list[str]:
    root = Path(torch.__file__).parent / "include"
    return [f"-I{root}", f"-I{root / 'torch/csrc/api/include'}", f"-DTORCH_TARGET_VERSION={TORCH_ABI}"]


def _libraries() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]


def main() -> int:
    if library().exists():
        return 0
    print("Compiling the C++ kernels: about a minute of one core", flush=True)
    started = time.monotonic()
    try:
        target, skipped = build()
    except (BuildFailed, OSError) as error:
        print(f"The C++ kernels were not compiled; PyTorch is used, which is slower: {error}", file=sys.stderr)
        return 1
    for reason in skipped:
        print(f"Skipped level {reason}")
    for other in BUILT.glob("paged_cpu-*.so"):
        if other != target:
            other.unlink()
    print(f"Compiled in {time.monotonic() - started:.0f} s: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
