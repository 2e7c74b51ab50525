"""A Redis server on this machine that keeps nothing on disk."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from paged_backend.files.start_checks import ROOT
from paged_client.serving.ports import choose_ports

UNPACKED = ROOT / ".cache/redis/usr"  # where .ci/run unpacks Debian's packages
START_SECONDS = 60.0


def find_redis() -> str | None:
    """Return the path of `redis-server`, or None."""
    unpacked = UNPACKED / "bin/redis-server"
    return shutil.which("redis-server") or (str(unpacked) if unpacked.exists() else None)


class RedisServer:
    """A running `redis-server` with a log in a directory."""

    def __init__(self, directory: Path, *options: str, port: int = 0, tls: bool = False):
        """Start the server. options: for the command line. port: 0 chooses a free one. tls: accept only TLS."""
        self.port = port or choose_ports(redis=0)[0]
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        self._options = [*ports, "--save", "", "--appendonly", "no", "--dir", str(directory), *options]
        self._log = directory / "redis.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server, and wait until its port is open. Raises RuntimeError if it does not start."""
        program = find_redis()
        assert program
        paths = [os.environ.get("LD_LIBRARY_PATH"), *map(str, UNPACKED.glob("lib/*"))]
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([program, *self._options], stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_listening():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server does not start: {self._log.read_text()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the server, if it runs."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _is_listening(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False
