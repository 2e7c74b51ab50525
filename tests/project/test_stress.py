"""Tests of the stress tests themselves, without a server: the checker, the plans and the table."""

import asyncio
import io
import itertools
import json
import random
import traceback

import pytest

from tests.support.stress import table
from tests.support.stress.checker import check, error_class
from tests.support.stress.clients import Clients
from tests.support.stress.history import History
from tests.support.stress.plans import FAULTS, PHASES, from_json, plans, to_json
from tests.support.stress.requests import StressRequest, make_requests
from tests.support.stress.server import Log

HELD = {"total": 8, "used": 0, "free": 5, "cached": 3, "running": 0, "waiting": 0, "shm": 1,
        "processes": {"stub": {"threads": 9, "files": 4, "sockets": 1}}}  # fmt: skip


def invoke(id="a", expect=((5, 6, 7),), allowed_ends=(), fault=None, phase=None):
    texts = ["".join(chr(33 + token) for token in tokens) for tokens in expect]
    return {"kind": "invoke", "id": id, "expect": [list(tokens) for tokens in expect], "texts": texts,
            "finish": ["length"] * len(expect), "allowed_ends": list(allowed_ends), "fault": fault,
            "phase": phase}  # fmt: skip


def tokens(*samples, id="a", at=None):
    texts = ["".join(chr(33 + token) for token in tokens) for tokens in samples]
    return {"kind": "tokens", "id": id, "tokens": [list(sample) for sample in samples], "texts": texts, "at": at}


def finish(*reasons, id="a"):
    return {"kind": "terminal", "id": id, "how": "finish", "finish": list(reasons or ["length"])}


def error(text, id="a"):
    return {"kind": "terminal", "id": id, "how": "error", "error": text}


def left(id="a"):
    return {"kind": "terminal", "id": id, "how": "left", "fault": "rst"}


def idle(seconds=0.1, **after):
    return {"kind": "idle", "seconds": seconds, "before": HELD, "after": HELD | after}


def stopped(code=0, seconds=1.0, left=0):
    return {"kind": "stopped", "code": code, "seconds": seconds, "left": left}


def cycle(stubs=1, shm=6):
    return {"kind": "cycle", "number": 3, "stubs": stubs, "shm": shm, "before": 6}


def rejection(refused):
    return {"kind": "refusal", "refused": refused}


PROBE = {"kind": "probe", "id": "a"}
VALID = [invoke(), tokens([5], at=0), tokens([6, 7], at=1), finish()]


@pytest.mark.parametrize(
    "events",
    [
        VALID,
        [invoke(expect=((1, 2), (3,))), tokens([1], [3]), tokens([2], []), finish("length", "length")],
        [invoke(allowed_ends=["left"]), tokens([5]), left()],
        [invoke(allowed_ends=["timeout"]), tokens([5]), finish("timeout")],
        [invoke(allowed_ends=["CANCELLED"]), error("CANCELLED: the request was cancelled by its client")],
        [PROBE, *VALID, idle(), idle(free=1, cached=7), rejection(True), stopped()],
        [cycle()],
    ],
)
def test_valid_histories_have_no_problems(events):
    assert check(events).problems == []


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([invoke()], "lost"),
        ([invoke(), tokens([5, 6, 7])], "lost"),
        ([invoke(), {"kind": "terminal", "id": "a", "how": "lost", "why": "no end"}], "lost"),
        ([invoke(), tokens([5, 6]), finish()], "missing tokens"),
        ([invoke(), tokens([5, 9, 7]), finish()], "wrong token"),
        ([invoke(), tokens([5, 6, 7, 8]), finish()], "wrong token"),
        ([invoke(), tokens([5, 6, 7]) | {"texts": ["&'!"]}, finish()], "wrong text"),
        ([invoke(), tokens([5], at=0), tokens([6, 7], at=2), finish()], "gap"),
        ([*VALID, finish()], "double terminal"),
        ([*VALID, error("CANCELLED: too late")], "double terminal"),
        ([*VALID, tokens([8])], "after terminal"),
        ([*VALID, tokens([])], "after terminal"),
        ([invoke(), tokens([5, 6, 7]), finish("stop")], "wrong finish"),
        ([invoke(), tokens([5, 6, 7], [1]), finish()], "samples"),
        ([invoke(), error("CANCELLED: by nobody")], "unexpected end"),
        ([invoke(), finish("timeout")], "unexpected end"),
        ([invoke(), left()], "unexpected end"),
        ([invoke(allowed_ends=["UNAVAILABLE"]), error("TypeError: 'NoneType' object")], "unknown error"),
        ([*VALID, *VALID], "double invoke"),
        ([PROBE, invoke(allowed_ends=["left"]), left()], "no probe"),
        ([PROBE], "no probe"),
        ([idle(free=4)], "leak"),
        ([idle(used=1, free=4)], "leak"),
        ([idle(waiting=1)], "leak"),
        ([idle(shm=2)], "leak"),
        ([idle(processes={"stub": {"threads": 10, "files": 4, "sockets": 1}})], "leak"),
        ([idle(processes={"stub": {"threads": 9, "files": 5, "sockets": 1}})], "leak"),
        ([idle(processes={})], "leak"),
        ([idle(seconds=3)], "slow"),
        ([{"kind": "raised", "what": "a step failed: ValueError"}], "exception"),
        ([cycle(stubs=2)], "leak"),
        ([cycle(stubs=0)], "leak"),
        ([cycle(shm=7)], "leak"),
        ([{"kind": "grows", "by": 1.1, "most": 1}], "leak"),
        ([rejection(False)], "bad stop"),
        ([stopped(seconds=6)], "slow"),
        ([stopped(code=1)], "bad stop"),
        ([stopped(left=1)], "bad stop"),
    ],
)
def test_violations_are_found(events, kind):
    assert kind in check(events).kinds


def test_a_wrong_token_is_reported_once():
    events = [invoke(expect=(range(20),)), *[tokens([99 if at == 3 else at], at=at) for at in range(20)], finish()]
    assert [problem.kind for problem in check(events).problems].count("wrong token") == 1


def test_requests_and_faults_are_counted():
    events = [*VALID, invoke("b", allowed_ends=["left"], fault="rst", phase="decode"), tokens([5], id="b"), left("b")]
    verdict = check([*events, idle(0.5), idle(0.2), stopped(seconds=1.5)])
    assert (verdict.requests, verdict.responses, verdict.tokens) == (2, 3, 4)
    assert verdict.killed == {("rst", "decode"): 1}
    assert verdict.outcomes == {"finish": 1, "left": 1}
    assert (verdict.idle_seconds, verdict.stopped_seconds) == (0.5, 1.5)
    assert "1 streams killed: rst in decode 1" in str(verdict)


def test_concurrent_requests_are_counted():
    """First two requests, then two others; one of each pair has a token."""
    many = [invoke(id, allowed_ends=["left"]) | {"protocol": "http"} for id in "abcd"]
    events = [many[0], many[1], tokens([5], id="a"), left("a"), left("b"), many[2], tokens([5], id="c"), many[3]]
    verdict = check([*events, left("c"), left("d")])
    assert (verdict.most_open, verdict.most_with_tokens) == (2, 1)


def test_time_from_disconnect_to_free_blocks():
    """A disconnect before the first token is noticed over gRPC only. The time of a kill is unknown."""
    first = [invoke(id, allowed_ends=["left"]) | {"protocol": "grpc" if id == "b" else "http"} for id in "abcd"]
    ends = [left(id) | {"t": 10.0} for id in "abc"] + [left("d") | {"t": 10.0, "fault": "kill"}]
    freed = [{"kind": "freed", "id": id, "at": 10.0 + 0.25 * number} for number, id in enumerate("abcdx", 1)]
    verdict = check([*first, tokens([5], id="a"), *ends, *freed])
    assert verdict.freed == {"noticed": [0.25, 0.5], "over HTTP before a token": [0.75]}


def test_drops_and_exceptions_are_parsed_from_a_log():
    log = Log()
    log("I1122 model.py: the model is loaded\n")
    log("dropped kill1-7 at 12.5\n")
    try:
        {}["x"]
    except KeyError:
        for line in ("request 7: could not answer", *traceback.format_exc().splitlines(), "what comes after"):
            log(f"{line}\n")
    assert (log.drops(), log.raised()) == ([("kill1-7", 12.5)], ["request 7: could not answer: KeyError: 'x'"])
    log("Traceback (most recent call last):\n")
    assert (log.drops(), log.raised()) == ([], [])  # the traceback is not complete
    log("ValueError: x\n")
    assert log.raised() == ["what comes after: ValueError: x"]


def test_goals_are_compared_with_figures():
    enough = table.Goal("steps", "enough", 100, 1000, done=[60, 40])
    assert enough.cells() == ("steps", "100", "1,000", "100", "meets make test")
    assert table.Goal("steps", "enough", 100, 1000, done=[900, 200]).cells()[-1] == "meets make nightly"
    assert table.Goal("steps", "enough", 100, 1000, done=[7]).cells()[-1] == "7% of the goal of make test"
    assert table.Goal("held", "enough", 100, 1000, "at once", done=[60, 70]).cells()[3] == "70 at once"
    assert table.Goal("growth", "below", 2, 0.5, "MiB", done=[0.7, 0.1]).cells()[1:] == (
        "< 2 MiB", "< 0.5 MiB", "0.7 MiB", "meets make test"
    )  # fmt: skip
    assert table.Goal("growth", "below", 2, 0.5, done=[3]).cells()[-1] == "above"
    late = table.Goal("time", "p99", 2, 2, "ms", done=[1.5] * 199 + [9])
    assert late.cells()[3:] == ("1.5 ms, 200 times", "meets make nightly")


def test_zero_failures_are_reported_with_an_upper_bound():
    assert table.bound(0, 5_000) == "0 of 5,000: under 0.06% at 95%"
    assert table.bound(2, 5_000) == "2 of 5,000"


def test_error_classes_are_parsed():
    assert error_class("Error generating stream: INVALID_ARGUMENT: max_tokens=0: must be 1..8192") == "INVALID_ARGUMENT"
    assert error_class("CANCELLED: the request was cancelled by its client") == "CANCELLED"
    assert error_class("Request for unknown model: 'paged_llm' is not found") == "SERVER"
    assert error_class("Stub process is not healthy") is None


ASKS = [StressRequest("abc", {"max_tokens": 8}, [[1] * 8], ["x" * 8], ["length"])]


def test_plans_are_deterministic_and_cover_all_faults_and_phases():
    first, second = (list(itertools.islice(plans(seed, ASKS, faulty=0.9), 2000)) for seed in (3, 3))
    assert first == second
    assert first != list(itertools.islice(plans(4, ASKS, faulty=0.9), 2000))
    for protocol, faults in FAULTS.items():
        seen = {(plan.fault, plan.phase) for plan in first if plan.protocol == protocol}
        # The server measures the deadline, so that it cannot be aimed at the last token.
        assert {(fault, phase) for fault in faults for phase in PHASES} - seen == {("deadline", "last")}
    assert [from_json(json.loads(json.dumps(to_json(plan)))) for plan in first[:50]] == first[:50]


def test_requests_cover_all_sampling_kinds():
    requests = make_requests(random.Random(1), 16, prompt=(4, 8), output=(2, 9))
    assert requests == make_requests(random.Random(1), 16, prompt=(4, 8), output=(2, 9))
    names = {name for request in requests for name in request.sampling}
    assert names >= {"temperature", "n", "beam_width", "stop", "seed"}


@pytest.mark.parametrize(
    "answer",
    [
        b"",  # it closes
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",  # no finish reason
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n0\r\n\r\n",
    ],
)
def test_a_stream_without_an_end_is_lost(answer):
    async def main():
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1")
        clients = Clients(server.sockets[0].getsockname()[1], "localhost:1", history)
        plan = next(plan for plan in plans(1, ASKS, faulty=0, invalid=0) if plan.protocol == "http")
        await clients.play(plan)
        await clients.close()
        server.close()

    history = History(io.StringIO())
    asyncio.run(main())
    assert check(map(json.loads, history._file.getvalue().splitlines())).kinds == {"lost"}
