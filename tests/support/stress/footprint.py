"""The resources of a server's processes: threads, open files, sockets, memory, shared memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def processes(pid: int) -> dict[str, int]:
    """Return the ids of a server's processes by name: `tritonserver`, and `stub of MODEL`."""
    return {"tritonserver": pid} | {_model(child): child for child in _children(pid)}


def footprint(pid: int, shm_prefix: str) -> dict[str, Any]:
    held = {}
    for name, process in processes(pid).items():
        with suppress(OSError):  # the process has exited
            held[name] = _held(process)
    held.get("tritonserver", {}).pop("threads", None)  # the size of gRPC's thread pool varies
    return {"processes": held, "shm": len(list(Path("/dev/shm").glob(f"{shm_prefix}*")))}


def resident(pid: int) -> dict[str, int]:
    """Return the resident memory of each process, in bytes."""
    found = {}
    for name, process in processes(pid).items():
        with suppress(OSError):
            found[name] = int((PROC / str(process) / "statm").read_text().split()[1]) * PAGE
    return found


def busy_seconds(pid: int) -> dict[str, float]:
    """Return the CPU seconds of each process so far."""
    found = {}
    for name, process in processes(pid).items():
        with suppress(OSError):
            user, system = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[11:13]
            found[name] = (int(user) + int(system)) / TICKS
    return found


class Memory:
    """Records the memory of each process over time."""

    def __init__(self, pid: int):
        self._pid = pid
        self._seen: list[tuple[float, dict[str, int]]] = []

    async def watch(self) -> None:
        """Record until it is cancelled."""
        while True:
            self._seen.append((time.monotonic(), resident(self._pid)))
            await asyncio.sleep(0.5)

    def slopes(self) -> dict[str, float]:
        """Return the growth of each process in the second half, in MiB per minute, by linear regression."""
        half = self._seen[len(self._seen) // 2 :]
        return {
            name: slope([(when, held[name]) for when, held in half]) * 60 / 2**20
            for name in (half[0][1] if len(half) > 1 else {})
            if all(name in held for _, held in half)
        }


def slope(points: list[tuple[float, int]]) -> float:
    """Return the slope of the least squares line."""
    middle, mean = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((when - middle) ** 2 for when, _ in points)
    return sum((when - middle) * (value - mean) for when, value in points) / spread


def _held(process: int) -> dict[str, int]:
    targets = [_target(link) for link in (PROC / str(process) / "fd").iterdir()]
    sockets = sum(target.startswith("socket:") for target in targets)
    threads = sum(1 for _ in (PROC / str(process) / "task").iterdir())
    return {"threads": threads, "files": len(targets) - sockets, "sockets": sockets}


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return "socket:"


def _children(pid: int) -> Iterator[int]:
    for process in PROC.iterdir():
        with suppress(OSError, ValueError):
            stat = (process / "stat").read_text()
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                yield int(process.name)


def _model(process: int) -> str:
    """Return the name of a stub, which has the path of its model.py as an argument."""
    parts = (PROC / str(process) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    path = next((Path(part) for part in parts if part.endswith("model.py")), None)
    return f"stub of {path.parents[1].name}" if path else f"process {process}"
