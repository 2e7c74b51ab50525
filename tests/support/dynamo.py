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
class Discovery:
    """A directory in which Dynamo's processes find each other."""

    environment: dict[str, str] = field(repr=False)  # of these processes

    @classmethod
    def at(cls, directory: Path, **variables: str) -> Discovery:
        """variables: further environment variables of the processes."""
        local = {f"DYN_{name}_HOST": "127.0.0.1" for name in ("TCP_RPC", "TCP_RESPONSE_STREAM", "EVENT_PLANE")}
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return cls(kept | local | variables | {"DYN_FILE_KV": str(directory)})

    @contextmanager
    def worker(self, *servers: Any, flags: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
        """Run the workers of some servers until the end of the block. They must exit with 0 after SIGTERM."""
        urls = [flag for server in servers for flag in ("--url", server.grpc_url)]
        command = [sys.executable, "-m", "paged_client", "dynamo", *urls, *BACKENDS, *flags]
        environment = self.environment | {"PYTHONPATH": f"{ROOT}:{ROOT}/kernels:{ROOT}/client"}
        with started(command, environment, "as a Dynamo worker") as (process, _):
            yield process

    def instances(self) -> int:
        """Return the number of served models of all workers."""
        found = Path(self.environment["DYN_FILE_KV"]).glob("v1/instances/*")
        return sum("kv%5Fquery" not in path.name for path in found)


@dataclass
class Frontend(Discovery):
    """A running frontend."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def models(self) -> dict[str, Any]:
        """Return the listed models by name."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=WAIT) as reply:
            return {model["id"]: model for model in json.load(reply)["data"]}

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
def frontend(directory: Path, *flags: str, **variables: str) -> Iterator[Frontend]:
    """Run a frontend. directory: for the discovery. variables: further environment variables of it and its workers."""
    _ensure(FRONTEND)
    environment = Discovery.at(directory, **variables).environment
    (port,) = choose_ports(port=0)
    command = [str(FRONTEND.python), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    command += [*BACKENDS, "--request-plane", "tcp", "--enable-anthropic-api", *flags]
    with started(command, environment, "Starting HTTP(S) service"):
        yield Frontend(environment, port)
