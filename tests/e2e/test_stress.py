"""Stress tests with fault injection against a real server; see tests/support/stress.

Streams are killed with every fault in every phase, the block pool is exhausted, thousands of requests run at once, and
models are reloaded. There are two sizes: for `make test`, and for `make nightly`, where each test ends after --hours.
"""

import json
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from paged_client.serving.tritonserver import TritonServer
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
    requests: int  # different requests
    killed: int  # killed streams, half of them in each of two tests
    left: int  # streams killed with few concurrent requests
    held: int  # concurrent requests
    preemptions: int
    responses: int  # responses of the soak test
    cycles: int  # reloads of the model
    restarts: int  # restarts of the server


LONG = Size(96, 250_000, 10_000, 20_000, 200_000, 100_000_000, 500, 200)
SIZES = [
    pytest.param(Size(24, 60, 10, 100, 10, 200, 1, 2), id="seeded"),
    pytest.param(LONG, id="long", marks=pytest.mark.nightly),
]


@pytest.fixture(params=SIZES)
def size(request):
    """The sizes of the tests, with the changes of --stress."""
    asked = dict(one.split("=") for one in request.config.getoption("stress").split())
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


@pytest.fixture(scope="module")
def stressed(printable, logging_repository):
    """(server, its log). It is killed, since streams that were cancelled may keep it from stopping."""
    log = Log()
    with TritonServer(printable[0], OPTIONS, repository=logging_repository, echo=log) as server:
        yield server, log
        server.kill()


def checked(verdict):
    """Return a verdict, which must have no problems."""
    assert not verdict.problems, str(verdict)
    return verdict


def test_no_request_is_lost_under_stress(printable, stressed, size, hours, tmp_path, print_line):
    server, log = stressed
    stress = StressTest(server, tmp_path, SEED, requests=size.requests, log=log, report=print_line, hours=hours)
    greedy = [one for one in stress.requests if one.sampling == one.sampling | {"temperature": 0}]
    for one in greedy[:4]:
        if "n" not in one.sampling:  # the expected tokens themselves are those of transformers
            prompt = byte_tokenizer().encode(one.text)
            assert one.tokens == [generate_with_transformers(printable[1], prompt, one.sampling["max_tokens"])]
    assert checked(stress.kill(size.killed // 2)).killed.total() >= size.killed // 2 or stress.was_cut
    checked(stress.exhaust_pool(size.preemptions))
    stress.hours = 2 * hours  # memory has to level off
    assert checked(stress.soak(size.responses)).responses >= size.responses or stress.was_cut


def test_cancelled_streams_leak_nothing(stressed, size, hours, tmp_path):
    """gRPC streams: see StressTest."""
    server, log = stressed
    stress = StressTest(server, tmp_path, SEED, cancels=True, requests=size.requests // 2, log=log, hours=hours)
    assert checked(stress.kill(size.killed // 2)).killed.total() >= size.killed // 2 or stress.was_cut
    checked(stress.leave(size.left))
    checked(stress.hold(size.held))


@pytest.mark.nightly
def test_thousands_of_concurrent_streams(repository, tmp_path):
    save_printable(tmp_path / "model", positions=1024)
    log = Log()
    with TritonServer(tmp_path / "model", ROOMY, repository=repository, echo=log) as server:
        stress = StressTest(server, tmp_path, SEED, requests=16, log=log)
        assert checked(stress.stream(6_000, tokens=600)).most_with_tokens >= 2_000
        checked(stress.stop())


@pytest.mark.nightly
def test_models_are_loaded_and_unloaded_under_load(printable, size, hours, tmp_path, print_line):
    repository = engine_alone(tmp_path / "repository")
    settings = repository / "paged_llm" / "1" / "model.json"
    settings.write_text(json.dumps(OPTIONS | {"model": str(printable[0])}))
    with (
        plain_server(repository, "--model-control-mode=explicit", "--load-model=paged_llm") as server,
        closing(Models(server, repository)) as models,
    ):
        stress = StressTest(server, tmp_path, SEED, requests=16, report=print_line, hours=hours)
        verdict = checked(stress.reload(models, size.cycles))
        assert verdict.outcomes["SERVER"] + verdict.outcomes["UNAVAILABLE"] > 0  # while the model was not loaded
        models.close()
        checked(stress.stop())


@pytest.mark.nightly
def test_a_stopped_or_killed_server_can_be_restarted(printable, size, hours, tmp_path, print_line):
    """It has the same ports, and returns the same outputs as before."""
    ports, first, end = {}, None, time.monotonic() + 3600 * hours
    for number in range(size.restarts + 1):
        log = Log()
        with TritonServer(printable[0], OPTIONS, engine_only=True, echo=log, **ports) as server:
            ports = {name: getattr(server, name) for name in ("http_port", "grpc_port", "metrics_port")}
            stress = StressTest(server, tmp_path, SEED, requests=16, log=log)
            assert stress.requests == (first := first or stress.requests)
            checked(stress.kill(50))
            checked(stress.crash() if number % 2 else stress.stop())
        assert not list(Path("/dev/shm").glob(f"{server.shm_prefix}*"))
        table.record("servers stopped or killed, and restarted", number > 0)
        print_line(f"{number} of {size.restarts} servers restarted")
        if number and time.monotonic() > end:
            break


@pytest.mark.nightly
def test_injected_faults_are_detected(printable, tmp_path):
    """A leaked block, a missing final response, a duplicate one, and a wrong token."""
    asked = {"leak_block": 900, "wrong_token": 9000, "drop_final": 450, "double_final": 500}
    repository = faults.inject_into_repository(with_floor(tmp_path / "repository"), asked)
    with TritonServer(printable[0], OPTIONS, repository=repository) as server:
        stress = StressTest(server, tmp_path, SEED, timeout=40, control=True)
        # A wrong token after a stop string would not be visible.
        stress.requests = [one for one in stress.requests if "stop" not in one.sampling]
        verdict = stress.steady(600)
        server.kill()  # it would wait for the lost requests
    found = {kind: {one.id for one in verdict.problems if one.kind == kind} for kind in verdict.kinds}
    assert "blocks" in found["leak"]
    assert len(found["lost"]) == len(found["double terminal"]) == 1
    assert len(found["wrong token"] - found["double terminal"]) == 1
    assert len({id for ids in found.values() for id in ids if id.startswith("play")}) == 3
