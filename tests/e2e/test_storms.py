"""Stress tests with a real server: clients killed in every way and phase, an exhausted pool, thousands of concurrent
requests, and models that are loaded and unloaded. See tests/support/stress.

There are two sizes: a short one that runs with the other tests, and a long one that ends after --hours.
"""

import json
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from client.serving.tritonserver import TritonServer
from tests.support import faults
from tests.support.in_process import byte_tokenizer, generate_with_transformers
from tests.support.stress import table
from tests.support.stress.campaign import StressTest
from tests.support.stress.models import Models
from tests.support.stress.server import OPTIONS, ROOMY, Log, engine_alone, save_printable, with_floor
from tests.support.triton import plain_server

SEED = 7


@dataclass(frozen=True)
class Size:
    killed: int  # streams, half of them in each of two runs
    left: int  # streams killed while the server is not overloaded
    held: int  # requests at once
    preemptions: int
    responses: int  # of the soak test
    cycles: int  # of loading
    restarts: int  # of servers


SIZES = [
    pytest.param(Size(1_000, 200, 1_000, 200, 3_000, 2, 2), id="seeded"),
    pytest.param(Size(250_000, 10_000, 20_000, 200_000, 100_000_000, 500, 200), id="long", marks=pytest.mark.nightly),
]


@pytest.fixture(params=SIZES)
def size(request):
    """The size that --storm selects."""
    asked = dict(one.split("=") for one in request.config.getoption("storm").split())
    return replace(request.param, **{name: int(count) for name, count in asked.items()})


@pytest.fixture(scope="module")
def printable(tmp_path_factory):
    """(directory, model)"""
    directory = tmp_path_factory.mktemp("printable")
    return directory, save_printable(directory)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return with_floor(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def logging_repository(tmp_path_factory):
    """A model repository whose engine logs when the blocks of an aborted request are free."""
    return faults.inject_into_repository(with_floor(tmp_path_factory.mktemp("logging")), {"log_drops": 1})


def well(verdict):
    """Check that no violation was found; the message has all of them."""
    assert not verdict.problems, str(verdict)
    return verdict


def test_no_request_is_lost_under_stress(printable, logging_repository, size, hours, tmp_path, tell):
    log = Log()
    with TritonServer(printable[0], OPTIONS, repository=logging_repository, echo=log) as server:
        storm = StressTest(server, tmp_path, SEED, log=log, tell=tell, hours=hours)
        for ask in [ask for ask in storm.asks if ask.sampling == ask.sampling | {"temperature": 0}][:4]:
            if "n" not in ask.sampling:  # the expected tokens are those of transformers
                prompt = byte_tokenizer().encode(ask.text)
                assert ask.tokens == [generate_with_transformers(printable[1], prompt, ask.sampling["max_tokens"])]
        assert well(storm.kill(size.killed // 2)).killed.total() >= size.killed // 2 or storm.was_cut
        well(storm.dry(size.preemptions))
        assert well(storm.soak(size.responses)).responses >= size.responses or storm.was_cut
        well(storm.stop())


def test_cancelled_streams_leak_nothing(printable, logging_repository, size, hours, tmp_path):
    """Over gRPC only: see StressTest."""
    log = Log()
    with TritonServer(printable[0], OPTIONS, repository=logging_repository, echo=log) as server:
        storm = StressTest(server, tmp_path, SEED, cancels=True, asks=48, log=log, hours=hours)
        assert well(storm.kill(size.killed // 2)).killed.total() >= size.killed // 2 or storm.was_cut
        well(storm.leave(size.left))
        well(storm.hold(size.held))
        server.kill()


@pytest.mark.nightly
def test_thousands_of_concurrent_streams(repository, tmp_path):
    save_printable(tmp_path / "model", positions=1024)
    log = Log()
    with TritonServer(tmp_path / "model", ROOMY, repository=repository, echo=log) as server:
        storm = StressTest(server, tmp_path, SEED, asks=16, log=log)
        assert well(storm.stream(6_000, tokens=600)).most_begun >= 2_000
        well(storm.stop())


def test_models_are_loaded_and_unloaded_under_load(printable, size, hours, tmp_path, tell):
    repository = engine_alone(tmp_path / "repository")
    settings = repository / "paged_llm" / "1" / "model.json"
    settings.write_text(json.dumps(OPTIONS | {"model": str(printable[0])}))
    with (
        plain_server(repository, "--model-control-mode=explicit", "--load-model=paged_llm") as server,
        closing(Models(server, repository)) as models,
    ):
        storm = StressTest(server, tmp_path, SEED, asks=16, tell=tell, hours=hours)
        verdict = well(storm.reload(models, size.cycles))
        assert verdict.outcomes["SERVER"] + verdict.outcomes["UNAVAILABLE"] > 0  # sent while no server ran
        models.close()
        well(storm.stop())


def test_a_stopped_or_killed_server_can_be_restarted(printable, repository, size, hours, tmp_path, tell):
    """It uses the same ports and generates the same output."""
    ports, first, end = {}, None, time.monotonic() + 3600 * hours
    for number in range(size.restarts + 1):
        log = Log()
        with TritonServer(printable[0], OPTIONS, repository=repository, echo=log, **ports) as server:
            ports = {name: getattr(server, name) for name in ("http_port", "grpc_port", "metrics_port")}
            storm = StressTest(server, tmp_path, SEED, asks=16, log=log)
            assert storm.asks == (first := first or storm.asks)
            well(storm.kill(50))
            well(storm.crash() if number % 2 else storm.stop())
        assert not list(Path("/dev/shm").glob(f"{server.shm_prefix}*"))
        table.done("servers stopped or killed, and started again", number > 0)
        tell(f"{number} of {size.restarts} servers started again")
        if number and time.monotonic() > end:
            break


def test_injected_faults_are_detected(printable, tmp_path):
    """The faults are a leaked block, a missing and a duplicate final response, and a wrong token."""
    asked = {"leak_block": 900, "wrong_token": 9000, "drop_final": 450, "double_final": 500}
    repository = faults.inject_into_repository(with_floor(tmp_path / "repository"), asked)
    with TritonServer(printable[0], OPTIONS, repository=repository) as server:
        storm = StressTest(server, tmp_path, SEED, patience=5, control=True)
        storm.asks = [ask for ask in storm.asks if "stop" not in ask.sampling]  # after which no token is compared
        verdict = storm.calm(600)
        server.kill()  # stopping it would wait for the lost request
    found = {kind: {one.id for one in verdict.problems if one.kind == kind} for kind in verdict.kinds}
    assert "blocks" in found["leak"]
    assert len(found["lost"]) == len(found["double terminal"]) == 1
    assert len(found["wrong token"] - found["double terminal"]) == 1
    assert len({id for ids in found.values() for id in ids if id.startswith("play")}) == 3
