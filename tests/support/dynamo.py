"""Runs NVIDIA Dynamo's frontend and `paged dynamo` workers, which find each other in a directory."""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paged_client.dynamo.processes import FRONTEND
from paged_client.serving.environments import EnvironmentSetupError, PackageEnvironment
from paged_client.serving.ports import choose_ports
from tests.support.triton import started
from tests.support.waiting import WAIT, until

ROOT = Path(__file__).resolve().parents[2]
VOCABULARIES = PackageEnvironment("vocabularies", "quicktok-v1", "0.4.0")
BACKENDS = ("--discovery-backend", "file", "--event-plane", "zmq")


@dataclass
class Worker:
    process: subprocess.Popen[str]
    log: list[str]  # lines so far


@dataclass
class Deployment:
    """A frontend. Its workers are started with `worker`."""

    port: int
    environment: dict[str, str] = field(repr=False)
    log: list[str] = field(repr=False)  # lines of the frontend so far

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def worker(self, *servers: Any, flags: tuple[str, ...] = (), ready: str = "as a Dynamo worker") -> Iterator[Worker]:
        """Run workers of servers until the end of the block. They must exit with 0 after SIGTERM."""
        urls = [flag for server in servers for flag in ("--url", server.grpc_url)]
        command = [sys.executable, "-m", "paged_client", "dynamo", *urls, *BACKENDS, *flags]
        environment = self.environment | {"PYTHONPATH": f"{ROOT}:{ROOT}/kernels:{ROOT}/client"}
        with started(command, environment, ready) as (process, log):
            yield Worker(process, log)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=WAIT) as reply:
            return json.load(reply)

    def models(self) -> dict[str, Any]:
        """Return the listed models by name."""
        return {model["id"]: model for model in self.get("/v1/models")["data"]}

    def instances(self) -> int:
        """Return the number of endpoints of models in the discovery."""
        found = Path(self.environment["DYN_FILE_KV"]).glob("v1/instances/*/*")
        return sum("%5Fkv%5Fquery" not in path.name for path in found)

    def wait_for(self, *names: str) -> None:
        until(lambda: set(names) <= self.models().keys(), f"the models {', '.join(names)} of the frontend")


def _ensure(environment: PackageEnvironment) -> None:
    """Skip the test if packages are missing and cannot be installed."""
    try:
        environment.ensure()
    except EnvironmentSetupError as error:  # no network
        pytest.skip(f"{environment.label} cannot be installed: {error}")


def harmony_vocabulary() -> Path:
    """Return a directory with the vocabulary that the parsers of gpt-oss would download: TIKTOKEN_ENCODINGS_BASE."""
    _ensure(VOCABULARIES)
    (file,) = VOCABULARIES.directory.glob("lib/*/site-packages/quicktok/data/o200k.vocab")
    written = VOCABULARIES.directory / "o200k_base.tiktoken"
    if not written.exists():
        data, offset, tokens = file.read_bytes(), 4, {}
        while offset < len(data):  # each token: its length, its bytes, its rank
            (length,) = struct.unpack_from("<H", data, offset)
            token, offset = data[offset + 2 : offset + 2 + length], offset + 6 + length
            (rank,) = struct.unpack_from("<I", data, offset - 4)
            tokens[rank] = token
        lines = (f"{base64.b64encode(tokens[rank]).decode()} {rank}\n" for rank in sorted(tokens))
        written.write_text("".join(lines))
    return written.parent


@contextmanager
def frontend(directory: Path, *flags: str, **variables: str) -> Iterator[Deployment]:
    """Run a frontend. directory: for the discovery. variables: further environment variables of it and its workers."""
    _ensure(FRONTEND)
    local = {f"DYN_{name}_HOST": "127.0.0.1" for name in ("TCP_RPC", "TCP_RESPONSE_STREAM", "EVENT_PLANE")}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment = kept | local | variables | {"DYN_FILE_KV": str(directory)}
    (port,) = choose_ports(port=0)
    command = [str(FRONTEND.python), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    command += [*BACKENDS, "--request-plane", "tcp", "--enable-anthropic-api", *flags]
    with started(command, environment, "Starting HTTP(S) service") as (_, log):
        made = Deployment(port, environment, log)
        yield made
