"""A real Redis server for tests of the remote cache, and a proxy that makes it slow."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from paged_bench._servers import RedisServer as LocalRedis
from paged_bench._servers import find_redis
from tests.support.forwarding import Forwarder

needs_redis = pytest.mark.skipif(not find_redis(), reason="no redis-server; .ci/run unpacks it")


class RedisServer(LocalRedis):
    """A Redis server on this machine that keeps nothing on disk, and its content."""

    def __init__(self, directory: Path, *options: str, tls: bool = False, password: str | None = None):
        """options: for the command line. tls: with the certificates of `make_certificates`."""
        login = ["--requirepass", password] if password else []
        super().__init__(directory, *options, *login, tls=tls)
        certificates = {"ssl": True, "ssl_ca_certs": str(directory / "ca.crt")} if tls else {}
        self.client = redis.Redis(port=self.port, host="localhost", password=password, **certificates)

    @property
    def keys(self) -> list[bytes]:
        """The keys of all blocks."""
        return sorted(key for key in self.client.keys("paged:*") if b":probe:" not in key)


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


class SlowProxy(Forwarder):
    """Forwards a TCP port. While it trickles, it sends one byte of each answer at a time, with pauses."""

    trickles = False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}/0"

    def answer(self, client: socket.socket, data: bytes) -> None:
        if not self.trickles:
            return client.sendall(data)
        for byte in data:
            client.sendall(bytes([byte]))
            time.sleep(0.01)
