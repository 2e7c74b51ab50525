"""The server under test: a random model of printable characters, and the server's metrics and log."""

from __future__ import annotations

import re
import shutil
import time
import urllib.request
from pathlib import Path
from typing import Any, Protocol

from transformers import LlamaConfig, PreTrainedModel

from paged_client.serving.server_files import REPOSITORY_ROOT
from tests.support.in_process import save_tiny
from tests.support.stress.footprint import footprint
from tests.support.stress.requests import LETTERS, MODEL

FLOOR = "floor"
FLOOR_FILES = Path(__file__).with_name(FLOOR)
OPTIONS = {
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 256,  # too few for 32 of the longest sequences
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,  # longer prompts are split into chunks
    "max_queue_size": 0,  # thousands of requests wait
}
ROOMY = OPTIONS | {
    "max_num_seqs": 8192,
    "max_num_batched_tokens": 8192,
    "num_gpu_blocks_override": 1_000_000,
    "enable_prefix_caching": False,  # freeing a million cached blocks takes seconds at the end
}


class Log:
    """Collects from the lines of a server's log the requests that its engine dropped (see `log_drops` in
    tests/support/faults.py) and the exceptions."""

    DROPPED = re.compile(r"dropped (\S+) at (\d+\.\d+)$")
    TRACE = "Traceback (most recent call last):"

    def __init__(self) -> None:
        self._drops: list[tuple[str, float]] = []
        self._raised: list[str] = []
        self._before = ""
        self._tracing: str | None = None  # the line before a traceback that is not complete yet

    def __call__(self, line: str) -> None:
        line = line.rstrip()
        if found := self.DROPPED.search(line):
            self._drops.append((found[1], float(found[2])))
        elif line.endswith(self.TRACE):
            self._tracing = self._before
        elif self._tracing is not None and line and not line[0].isspace():
            self._raised.append(f"{self._tracing}: {line}")
            self._tracing = None
        self._before = line

    def drops(self) -> list[tuple[str, float]]:
        """Return ids and times by the monotonic clock, since the last call."""
        seen, self._drops = self._drops, []
        return seen

    def raised(self) -> list[str]:
        """Return each exception with the line before its traceback, since the last call."""
        seen, self._raised = self._raised, []
        return seen


class Server(Protocol):
    """The part of TritonServer that the stress tests use."""

    http_port: int
    shm_prefix: str

    @property
    def http_url(self) -> str: ...

    @property
    def grpc_url(self) -> str: ...

    @property
    def metrics_url(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def save_printable(directory: Path, positions: int = 256) -> PreTrainedModel:
    """Save a model with two layers and random weights.

    Each of its 94 tokens is a printable character, so that the offset of a character is that of its token.
    """
    config = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions,
    )  # fmt: skip
    return save_tiny(config, directory)


def engine_alone(directory: Path) -> Path:
    """Create a model repository with only the engine's own model, which loads in half the time."""
    source = REPOSITORY_ROOT / "model_repository" / MODEL
    shutil.copytree(source, directory / MODEL, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def with_floor(directory: Path) -> Path:
    """Create a repository that also has a model that only holds requests, to measure the cost of the server itself."""
    shutil.copytree(FLOOR_FILES, engine_alone(directory) / FLOOR, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def held(server: Server, model: str) -> int:
    """Return the open requests of a model, the engine or the floor. Metrics are some tenths of a second old."""
    name = "floor_requests" if model == FLOOR else "paged_requests"
    return sum(int(float(value)) for value in re.findall(rf"^{name}\{{.*?\}} (\S+)$", _metrics(server), re.M))


def counters(server: Server) -> dict[str, float]:
    """Return metrics of the engine: blocks by state, requests by state, preemptions."""
    found = {state: 0.0 for state in ("total", "used", "free", "cached", "running", "waiting", "preemptions")}
    for name, labels, value in re.findall(r"^(paged_\w+)\{(.*?)\} (\S+)$", _metrics(server), re.M):
        label = re.search(r'(?:state|kind)="(.*?)"', labels)
        if name in ("paged_kv_blocks", "paged_requests") and label:
            found[label.group(1)] = float(value)
        elif name == "paged_preemptions_total":
            found["preemptions"] += float(value)
    return found


def _metrics(server: Server) -> str:
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=60) as reply:
        return reply.read().decode()


def _held(server: Server) -> dict[str, Any]:
    """Return everything that has to be the same before and after the requests."""
    return counters(server) | footprint(server.pid, server.shm_prefix)


def wait_until_idle(
    server: Server, before: dict[str, Any] | None = None, *, timeout: float = 20.0
) -> tuple[float, dict]:
    """Wait until the server is idle with the same footprint as `before`, or until the timeout.

    Without `before`, wait until the footprint no longer changes. Return the seconds that it took, and the footprint.
    """
    started, latest = time.monotonic(), None
    while True:
        now = _held(server)
        took = time.monotonic() - started
        same = before or latest
        if took > timeout or (_idle(now) and same and _same(same, now)):
            return took, now
        latest = now
        time.sleep(0.02 if before else 1.0)  # polling takes CPU time from the server


def _idle(now: dict[str, Any]) -> bool:
    return not (now["used"] or now["running"] or now["waiting"]) and now["free"] + now["cached"] == now["total"] > 0


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Compare the footprint with the one before."""
    if before["shm"] != now["shm"]:
        return False
    return all(
        now["processes"].get(process, {}).get(name) == count
        for process, held in before["processes"].items()
        for name, count in held.items()
    )
