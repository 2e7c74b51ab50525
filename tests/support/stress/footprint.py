"""What the processes of a server hold: threads, open files, sockets, memory, shared memory."""

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
    """Ids of a server's processes by what they are: `tritonserver`, and a stub by its model's name."""
    return {"tritonserver": pid} | {_model(child): child for child in _children(pid)}


def footprint(pid: int, shm_prefix: str) -> dict[str, Any]:
    held = {}
    for name, process in processes(pid).items():
        with suppress(OSError):  # it has just ended
            held[name] = _held(process)
    held.get("tritonserver", {}).pop("threads", None)  # gRPC starts and ends threads of its pool as it likes
    return {"processes": held, "shm": len(list(Path("/dev/shm").glob(f"{shm_prefix}*")))}


def resident(pid: int) -> dict[str, int]:
    """Bytes of memory of each process."""
    found = {}
    for name, process in processes(pid).items():
        with suppress(OSError):
            found[name] = int((PROC / str(process) / "statm").read_text().split()[1]) * PAGE
    return found


def busy_seconds(pid: int) -> dict[str, float]:
    """Of a processor, that each process has had so far."""
    found = {}
    for name, process in processes(pid).items():
        with suppress(OSError):
            user, system = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[11:13]
            found[name] = (int(user) + int(system)) / TICKS
    return found


class Memory:
    """Of each process, as time goes by."""

    def __init__(self, pid: int):
        self._pid = pid
        self._seen: list[tuple[float, dict[str, int]]] = []

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            self._seen.append((time.monotonic(), resident(self._pid)))
            await asyncio.sleep(0.5)

    def slopes(self) -> dict[str, float]:
        """MiB a minute that each process has grown by in the second half: the line nearest to what was seen."""
        half = self._seen[len(self._seen) // 2 :]
        return {
            name: slope([(when, held[name]) for when, held in half]) * 60 / 2**20
            for name in (half[0][1] if len(half) > 1 else {})
            if all(name in held for _, held in half)
        }


def slope(points: list[tuple[float, int]]) -> float:
    """By least squares."""
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
    """Of a stub, which is told the path of its model.py."""
    parts = (PROC / str(process) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    path = next((Path(part) for part in parts if part.endswith("model.py")), None)
    return f"stub of {path.parents[1].name}" if path else f"process {process}"
