"""A real Redis server for tests of the remote cache: Debian's package, which .ci/run unpacks."""

from __future__ import annotations

import os
import shutil
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from paged_client.serving.ports import choose_ports
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".cache/redis/usr"


def find_redis() -> str | None:
    """Return the path of `redis-server`."""
    unpacked = UNPACKED / "bin/redis-server"
    return shutil.which("redis-server") or (str(unpacked) if unpacked.exists() else None)


needs_redis = pytest.mark.skipif(not find_redis(), reason="no redis-server; .ci/run unpacks it")


class RedisServer:
    """A Redis server on this machine that keeps nothing on disk."""

    def __init__(self, directory: Path, *options: str, port: int = 0, tls: bool = False, password: str | None = None):
        """options: for the command line. port: 0 chooses a free one."""
        self.port = port or choose_ports(redis=0)[0]
        self.tls = tls
        self._directory = directory
        self._password = password
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        self._options = [*ports, "--save", "", "--appendonly", "no", "--dir", str(directory), *options]
        if password:
            self._options += ["--requirepass", password]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> redis.Redis:
        """A client of the server."""
        tls = {"ssl": True, "ssl_ca_certs": str(self._directory / "ca.crt")} if self.tls else {}
        return redis.Redis(port=self.port, host="localhost", password=self._password, **tls)

    @property
    def keys(self) -> list[bytes]:
        """The keys of all blocks."""
        return sorted(key for key in self.client.keys("paged:*") if b":probe:" not in key)

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        program = find_redis()
        assert program
        libraries = os.pathsep.join(
            filter(None, [os.environ.get("LD_LIBRARY_PATH"), *map(str, UNPACKED.glob("lib/*"))])
        )
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, *self._options], stdout=log, stderr=log, env={**os.environ, "LD_LIBRARY_PATH": libraries}
            )
        until(self._answers, "redis-server")

    def kill(self) -> None:
        """Kill the server, if it runs."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with suppress(redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            return bool(self.client.ping())
        return False


@contextmanager
def running_redis(
    directory: Path, *options: str, tls: bool = False, password: str | None = None
) -> Iterator[RedisServer]:
    """Run a Redis server until the end of the block."""
    server = RedisServer(directory, *options, tls=tls, password=password)
    try:
        yield server
    finally:
        server.kill()


def make_certificates(directory: Path) -> list[str]:
    """Create a certificate authority `ca.crt` and a certificate of localhost. Return options for the server."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt")
    openssl("req", *curve, "-keyout", "server.key", "-out", "server.csr")
    (directory / "names").write_text("subjectAltName=DNS:localhost\n")
    signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", *signing, "-out", "server.crt")
    files = {"cert": "server.crt", "key": "server.key", "ca-cert": "ca.crt"}
    options = [text for name, file in files.items() for text in (f"--tls-{name}-file", str(directory / file))]
    return [*options, "--tls-auth-clients", "no"]


class SlowProxy(socketserver.ThreadingTCPServer):
    """Forwards a TCP port. While it trickles, it sends one byte of each answer at a time, with pauses."""

    allow_reuse_address, daemon_threads = True, True

    def __init__(self, target: int):
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = target
        self.trickles = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}/0"


class _Forward(socketserver.BaseRequestHandler):
    server: SlowProxy

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as target:
            threading.Thread(target=self._copy, args=[target, self.request], daemon=True).start()
            self._copy(self.request, target)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if target is self.request and self.server.trickles:
                    self._trickle(target, data)
                else:
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _trickle(self, target: socket.socket, data: Sequence[int]) -> None:
        for byte in data:
            target.sendall(bytes([byte]))
            time.sleep(0.01)
