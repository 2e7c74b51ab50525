"""The build of the C++ kernels: `python -m paged_kernels.cpu.build`.

The operators and the thread pool are in a common library, and the kernels of each level, an instruction set, in a
library of its own. Without arguments, the common library and the best level of this processor are compiled. Only the
common library needs torch, and its headers alone; the module itself does not import torch.

Libraries in `built/` are named after a hash of sources and flags, so that a stale one is never loaded. They work with
torch 2.11 and later versions.
"""

import argparse
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parent / "built"
COMPILERS = ("g++", "clang++")  # compilers in order of preference, unless CXX is set
FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wno-psabi".split()
TORCH_ABI = "0x020b000000000000"  # torch 2.11, the oldest that pyproject.toml allows

_AVX2 = "-mavx2 -mfma -mf16c"
_AVX512 = f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"
# Levels and the instructions that they need, the best first. The last one emulates tile instructions in plain C++, for
# tests.
LEVELS = {
    "x86_64": {
        "amx": f"{_AVX512} -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16",
        "avx512_bf16": f"{_AVX512} -mavx512vnni -mavx512bf16",
        "avx512_vnni": f"{_AVX512} -mavx512vnni",
        "avx512": _AVX512,
        "avx2": f"{_AVX2} -mtune=haswell",  # the sums of a tile do not fit in registers with GCC's generic tuning
    }
}.get(platform.machine(), {}) | {"plain": "", "amx_emulated": "-DPAGED_EMULATE_AMX=1 -Og"}
# Levels with tile instructions, which add in another order: the level that adds as they do without them.
WITHOUT_TILES = {"amx": "avx512_bf16", "amx_emulated": "plain"}
COMMON = "common"
COMPILING = "Compiling the C++ kernels"
TORCH_SOURCES = ("binding.cpp",)
PLAIN_SOURCES = ("pool.cpp", "tasks.cpp", "levels.cpp")
LEVEL_SOURCES = ("attention.cpp", "linear.cpp", "layer_ops.cpp", "level.cpp")

Report = Callable[[int, int], None]  # is called with the number of files that are compiled, and of all


class BuildFailed(Exception):
    """There is no compiler, or it failed. The message has the command and its error."""


@cache
def supported() -> tuple[str, ...]:
    """Return the levels that this processor has the instructions of, the best first."""
    flags = set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("flags"):
            flags = {flag.replace("_", "") for flag in line.split()}
            break

    def has(level: str) -> bool:
        options = [option for option in LEVELS[level].split() if option.startswith("-m") and "=" not in option]
        needed = {option[2:].replace("-", "") for option in options}  # instructions
        return needed <= flags and ("amxtile" not in needed or _may_use_tiles())

    return tuple(filter(has, LEVELS))


def _may_use_tiles() -> bool:
    """Ask Linux for the permission to use tiles, which this process and its threads then have."""
    arch_prctl, ask_for_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, ask_for_permission, tile_data) == 0


def with_tileless(level: str) -> list[str]:
    """Return the levels whose libraries a level needs: itself, and the one that is used if tiles must be avoided."""
    return [level, *([WITHOUT_TILES[level]] if level in WITHOUT_TILES else [])]


def library(name: str) -> Path:
    """Return the path of the library of a level, or of the common library, built or not."""
    digest = hashlib.sha256(repr((FLAGS, LEVELS, TORCH_ABI, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return BUILT / f"paged_cpu-{digest.hexdigest()[:16]}-{name}.so"


def find_compiler() -> str:
    """Return the C++ compiler. Raises BuildFailed if there is none."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None or shutil.which(compiler) is None:
        raise BuildFailed(f"no C++ compiler: none of {', '.join([compiler] if compiler else COMPILERS)} is on PATH")
    return compiler


def build(names: Sequence[str], report: Report = lambda done, total: None) -> dict[str, BuildFailed]:
    """Compile these libraries, except for existing ones. Returns the error of each library that failed.

    Several processes may do so at the same time: each library is compiled once, and is complete as soon as it exists.
    Raises BuildFailed if there is no compiler.
    """
    if all(library(name).exists() for name in names):
        return {}
    compiler = find_compiler()
    BUILT.mkdir(exist_ok=True)
    with _lock(), tempfile.TemporaryDirectory(dir=BUILT) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        targets = {name: library(name) for name in names if not library(name).exists()}  # hashed before compiling
        failed = dict[str, BuildFailed]()
        done, lock = [0], threading.Lock()
        units = {name: _units(name, failed) for name in targets}
        total = sum(map(len, units.values()))
        report(0, total)

        def compiled(name: str, source: str, flags: Sequence[str]) -> str:
            target = f"{folder}/{name}-{source}.o"
            run_compiler([compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", target])
            with lock:
                done[0] += 1
                report(done[0], total)
            return target

        jobs = {name: [pool.submit(compiled, name, *unit) for unit in units[name]] for name in targets}
        for name in [name for name in targets if name not in failed]:
            whole = f"{folder}/{name}.so"
            try:
                objects = [job.result() for job in jobs[name]]
                run_compiler([compiler, "-shared", "-o", whole, *objects, *(_libraries() if name == COMMON else ())])
                os.replace(whole, targets[name])
            except BuildFailed as error:
                failed[name] = error
                for job in jobs[name]:
                    job.cancel()
    return failed


def build_best(report: Report = lambda done, total: None, *, common: bool = True) -> tuple[str, list[str]]:
    """Compile the best level of this processor that the compiler knows, and the common library.

    Returns the level, and why better ones were skipped. Raises BuildFailed. common=False leaves the common library out.
    """
    skipped = list[str]()
    for level in supported():
        wanted = with_tileless(level)
        failed = build([*wanted, COMMON] if common else wanted, report)
        if COMMON in failed:
            raise failed[COMMON]
        if not failed:
            return level, skipped
        skipped += [f"{level}: {next(iter(failed.values()))}"]
    raise BuildFailed(skipped[-1])


@contextmanager
def _lock() -> Iterator[None]:
    with open(BUILT / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _units(name: str, failed: dict[str, BuildFailed]) -> list[tuple[str, list[str]]]:
    """Return the sources of a library with their flags, the slowest first."""
    if name != COMMON:
        return [(source, LEVELS[name].split()) for source in LEVEL_SOURCES]
    torch = _torch()
    if torch is None:
        failed[name] = BuildFailed("torch is not installed")
        return []
    flags = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-DTORCH_TARGET_VERSION={TORCH_ABI}"]
    return [*((source, flags) for source in TORCH_SOURCES), *((source, []) for source in PLAIN_SOURCES)]


def _torch() -> Path | None:
    invalidate_caches()  # torch may have been installed since
    spec = find_spec("torch")  # imports nothing
    return Path(spec.origin).parent if spec and spec.origin else None


def _libraries() -> list[str]:
    return [f"-L{_torch()}/lib", "-ltorch_cpu", "-pthread"]


def run_compiler(command: Sequence[str]) -> None:
    """Run a command. Raises BuildFailed with its first error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildFailed(f"{command[0]} exited with {done.returncode}: {errors[0] if errors else 'no output'}")


class Progress:
    """Shows how far several pieces of work are: on a terminal in one line, elsewhere in a line every 10 seconds.

    Use it as a context manager. `update` may be called from any thread.
    """

    WIDTH = 20  # characters of the bar

    def __init__(self) -> None:
        self._parts: dict[str, tuple[int, int, str, float]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_terminal = sys.stdout.isatty()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._is_terminal:
            print("\r\033[K", end="", flush=True)

    def update(self, part: str, done: int, total: int, unit: str) -> None:
        """Say that `done` of `total` pieces of a part are done; total: 0 if it is unknown. The first call starts the
        part's clock."""
        with self._lock:
            began = self._parts[part][3] if part in self._parts else time.monotonic()
            self._parts[part] = (done, total, unit, began)

    def end(self, part: str) -> None:
        """Stop showing the parts whose names begin so."""
        with self._lock:
            self._parts = {name: shown for name, shown in self._parts.items() if not name.startswith(part)}

    def line(self) -> str:
        """Return a text such as "Compiling: 3 of 9 files, 21 s", with the progress of each part."""
        with self._lock:
            parts = list(self._parts.items())
        now = time.monotonic()
        return "; ".join(
            f"{part}: {f'{done} of {total}' if total else done} {unit}, {now - began:.0f} s"
            for part, (done, total, unit, began) in parts
        )

    def _bar(self) -> str:
        with self._lock:
            shares = [done / total if total else 0.0 for done, total, _, _ in self._parts.values()]
        filled = round(self.WIDTH * sum(shares) / max(1, len(shares)))
        return f"[{'#' * filled}{'-' * (self.WIDTH - filled)}]"

    def _show(self) -> None:
        while not self._ended.wait(0.5 if self._is_terminal else 10):
            if not (line := self.line()):
                continue
            if self._is_terminal:
                columns = shutil.get_terminal_size().columns
                print(f"\r\033[K{f'{self._bar()} {line}'[: columns - 1]}", end="", flush=True)
            else:
                print(line, flush=True)


def reporter(progress: Progress, levels: Sequence[str]) -> Report:
    """Return a Report for `build` that shows the compilation of some levels, or of the operators alone."""
    missing = [level for level in levels if not library(level).exists()]
    part = f"{COMPILING}, {'level ' + ', '.join(missing) if missing else 'operators'}"
    return lambda done, total: progress.update(part, done, total, "files")


def _level(name: str) -> str:
    if name not in LEVELS:
        raise argparse.ArgumentTypeError(f"{name!r}: must be one of {', '.join(LEVELS)}")
    return name


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m paged_kernels.cpu.build", description="Compile the C++ kernels.")
    parser.add_argument("levels", nargs="*", type=_level, metavar="LEVEL",
                        help=f"levels (default: the best of this processor): {', '.join(LEVELS)}")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="compile all levels that the compiler knows")
    args = parser.parse_args(argv)
    names = list(LEVELS) if args.all else [name for level in args.levels for name in with_tileless(level)]
    began, before = time.monotonic(), set(BUILT.glob("paged_cpu-*.so"))
    try:
        with Progress() as progress:
            if names:
                failed = build([*dict.fromkeys(names), COMMON], reporter(progress, names))
                skipped = [f"{name}: {error}" for name, error in failed.items()]
                if COMMON in failed or (failed and not args.all):
                    raise next(iter(failed.values()))
            else:
                best, skipped = build_best(reporter(progress, supported()[:1]))
                names = with_tileless(best)
    except (BuildFailed, OSError) as error:
        print(f"The C++ kernels were not compiled; PyTorch is used, which is slower: {error}", file=sys.stderr)
        return 1
    for reason in skipped:
        print(f"Skipped level {reason}")
    remove_stale()
    if set(BUILT.glob("paged_cpu-*.so")) - before:
        seconds = time.monotonic() - began
        made = ", ".join(name for name in names if library(name) not in before)
        print(f"Compiled the C++ {f'kernels ({made})' if made else 'operators'} in {seconds:.0f} s")
    return 0


def remove_stale() -> None:
    """Remove libraries of other sources."""
    current = {library(name) for name in (*LEVELS, COMMON)}
    for file in BUILT.glob("paged_cpu-*.so"):
        if file not in current:
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
