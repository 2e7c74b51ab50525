"""The checker of histories, and the seeds of storms: no server."""

import asyncio
import io
import itertools
import json
import random
import traceback

import pytest

from tests.support.stress import table
from tests.support.stress.asks import Ask, catalogue
from tests.support.stress.checker import check, error_class
from tests.support.stress.clients import Clients
from tests.support.stress.history import History
from tests.support.stress.plans import PHASES, WAYS, from_json, plans, to_json
from tests.support.stress.server import Log

HELD = {"total": 8, "used": 0, "free": 5, "cached": 3, "running": 0, "waiting": 0, "shm": 1,
        "processes": {"stub": {"threads": 9, "files": 4, "sockets": 1}}}  # fmt: skip


def invoke(id="a", expect=((5, 6, 7),), may=(), way=None, phase=None):
    texts = ["".join(chr(33 + token) for token in tokens) for tokens in expect]
    return {"kind": "invoke", "id": id, "expect": [list(tokens) for tokens in expect], "texts": texts,
            "finish": ["length"] * len(expect), "may": list(may), "way": way, "phase": phase}  # fmt: skip


def tokens(*samples, id="a", at=None):
    texts = ["".join(chr(33 + token) for token in tokens) for tokens in samples]
    return {"kind": "tokens", "id": id, "tokens": [list(sample) for sample in samples], "texts": texts, "at": at}


def finish(*reasons, id="a"):
    return {"kind": "terminal", "id": id, "how": "finish", "finish": list(reasons or ["length"])}


def error(text, id="a"):
    return {"kind": "terminal", "id": id, "how": "error", "error": text}


def left(id="a"):
    return {"kind": "terminal", "id": id, "how": "left", "way": "rst"}


def idle(seconds=0.1, **after):
    return {"kind": "idle", "seconds": seconds, "before": HELD, "after": HELD | after}


def stopped(code=0, seconds=1.0, left=0):
    return {"kind": "stopped", "code": code, "seconds": seconds, "left": left}


def cycle(stubs=1, shm=6):
    return {"kind": "cycle", "number": 3, "stubs": stubs, "shm": shm, "before": 6}


def knocked(refused):
    return {"kind": "knocked", "refused": refused}


PROBE = {"kind": "probe", "id": "a"}
WELL = [invoke(), tokens([5], at=0), tokens([6, 7], at=1), finish()]


@pytest.mark.parametrize(
    "events",
    [
        WELL,
        [invoke(expect=((1, 2), (3,))), tokens([1], [3]), tokens([2], []), finish("length", "length")],
        [invoke(may=["left"]), tokens([5]), left()],
        [invoke(may=["timeout"]), tokens([5]), finish("timeout")],
        [invoke(may=["CANCELLED"]), error("CANCELLED: the request was cancelled by its client")],
        [PROBE, *WELL, idle(), idle(free=1, cached=7), knocked(True), stopped()],
        [cycle()],
    ],
)
def test_what_is_well(events):
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
        ([*WELL, finish()], "double terminal"),
        ([*WELL, error("CANCELLED: too late")], "double terminal"),
        ([*WELL, tokens([8])], "after terminal"),
        ([*WELL, tokens([])], "after terminal"),
        ([invoke(), tokens([5, 6, 7]), finish("stop")], "wrong finish"),
        ([invoke(), tokens([5, 6, 7], [1]), finish()], "samples"),
        ([invoke(), error("CANCELLED: by nobody")], "unexpected end"),
        ([invoke(), finish("timeout")], "unexpected end"),
        ([invoke(), left()], "unexpected end"),
        ([invoke(may=["UNAVAILABLE"]), error("TypeError: 'NoneType' object")], "unknown error"),
        ([*WELL, *WELL], "double invoke"),
        ([PROBE, invoke(may=["left"]), left()], "no probe"),
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
        ([knocked(False)], "bad stop"),
        ([stopped(seconds=6)], "slow"),
        ([stopped(code=1)], "bad stop"),
        ([stopped(left=1)], "bad stop"),
    ],
)
def test_what_must_not_be_is_found(events, kind):
    assert kind in check(events).kinds


def test_one_wrong_token_is_told_once():
    events = [invoke(expect=(range(20),)), *[tokens([99 if at == 3 else at], at=at) for at in range(20)], finish()]
    assert [problem.kind for problem in check(events).problems].count("wrong token") == 1


def test_what_is_counted():
    events = [*WELL, invoke("b", may=["left"], way="rst", phase="decode"), tokens([5], id="b"), left("b")]
    verdict = check([*events, idle(0.5), idle(0.2), stopped(seconds=1.5)])
    assert (verdict.requests, verdict.responses, verdict.tokens) == (2, 3, 4)
    assert verdict.killed == {("rst", "decode"): 1}
    assert verdict.outcomes == {"finish": 1, "left": 1}
    assert (verdict.idle_seconds, verdict.stopped_seconds) == (0.5, 1.5)
    assert "1 streams killed: rst in decode 1" in str(verdict)


def test_what_is_open_at_once_is_counted():
    """Two, and later two, of which one has a token each time."""
    many = [invoke(id, may=["left"]) | {"face": "http"} for id in "abcd"]
    events = [many[0], many[1], tokens([5], id="a"), left("a"), left("b"), many[2], tokens([5], id="c"), many[3]]
    verdict = check([*events, left("c"), left("d")])
    assert (verdict.most_open, verdict.most_begun) == (2, 1)


def test_how_long_blocks_are_held_after_a_client_has_left():
    """Of one that left before a token a server learns over gRPC alone; who was killed has left at an unknown time."""
    first = [invoke(id, may=["left"]) | {"face": "grpc" if id == "b" else "http"} for id in "abcd"]
    ends = [left(id) | {"t": 10.0} for id in "abc"] + [left("d") | {"t": 10.0, "way": "kill"}]
    freed = [{"kind": "freed", "id": id, "at": 10.0 + 0.25 * number} for number, id in enumerate("abcdx", 1)]
    verdict = check([*first, tokens([5], id="a"), *ends, *freed])
    assert verdict.freed == {"noticed": [0.25, 0.5], "over HTTP before a token": [0.75]}


def test_what_a_log_tells():
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
    assert (log.drops(), log.raised()) == ([], [])  # it has not ended
    log("ValueError: x\n")
    assert log.raised() == ["what comes after: ValueError: x"]


def test_a_row_of_the_table_tells_how_far_a_run_came():
    enough = table.Goal("steps", "enough", 100, 1000, done=[60, 40])
    assert enough.cells() == ("steps", "100", "1,000", "100", "as asked of make test")
    assert table.Goal("steps", "enough", 100, 1000, done=[900, 200]).cells()[-1] == "as asked of make nightly"
    assert table.Goal("steps", "enough", 100, 1000, done=[7]).cells()[-1] == "7% of what make test is asked"
    assert table.Goal("held", "enough", 100, 1000, "at once", done=[60, 70]).cells()[3] == "70 at once"
    assert table.Goal("growth", "below", 2, 0.5, "MiB", done=[0.7, 0.1]).cells()[1:] == (
        "< 2 MiB", "< 0.5 MiB", "0.7 MiB", "as asked of make test"
    )  # fmt: skip
    assert table.Goal("growth", "below", 2, 0.5, done=[3]).cells()[-1] == "above"
    late = table.Goal("time", "p99", 2, 2, "ms", done=[1.5] * 199 + [9])
    assert late.cells()[3:] == ("1.5 ms, 200 times", "as asked of make nightly")


def test_nothing_is_told_with_what_that_says():
    assert table.bound(0, 5_000) == "0 of 5,000: under 0.06% at 95%"
    assert table.bound(2, 5_000) == "2 of 5,000"


def test_errors_have_classes():
    assert error_class("Error generating stream: INVALID_ARGUMENT: max_tokens=0: must be 1..8192") == "INVALID_ARGUMENT"
    assert error_class("CANCELLED: the request was cancelled by its client") == "CANCELLED"
    assert error_class("Request for unknown model: 'paged_llm' is not found") == "SERVER"
    assert error_class("Stub process is not healthy") is None


ASKS = [Ask("abc", {"max_tokens": 8}, [[1] * 8], ["x" * 8], ["length"])]


def test_a_seed_gives_the_same_storm_again_and_every_phase_and_way():
    first, second = (list(itertools.islice(plans(seed, ASKS, kills=0.9), 2000)) for seed in (3, 3))
    assert first == second
    assert first != list(itertools.islice(plans(4, ASKS, kills=0.9), 2000))
    for face, ways in WAYS.items():
        seen = {(plan.way, plan.phase) for plan in first if plan.face == face}
        # When a deadline comes, the server says: which token is its last cannot be aimed at.
        assert {(way, phase) for way in ways for phase in PHASES} - seen == {("deadline", "last")}
    assert [from_json(json.loads(json.dumps(to_json(plan)))) for plan in first[:50]] == first[:50]


def test_a_catalogue_has_every_kind():
    asks = catalogue(random.Random(1), 16, prompt=(4, 8), output=(2, 9))
    assert asks == catalogue(random.Random(1), 16, prompt=(4, 8), output=(2, 9))
    assert {name for ask in asks for name in ask.sampling} >= {"temperature", "n", "beam_width", "stop", "seed"}


@pytest.mark.parametrize(
    "answer",
    [
        b"",  # it closes
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",  # in due form, and without an end
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n0\r\n\r\n",
    ],
)
def test_a_client_that_gets_no_end_says_so(answer):
    async def main():
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1")
        clients = Clients(server.sockets[0].getsockname()[1], "localhost:1", history)
        plan = next(plan for plan in plans(1, ASKS, kills=0, bad=0) if plan.face == "http")
        await clients.play(plan)
        await clients.close()
        server.close()

    history = History(io.StringIO())
    asyncio.run(main())
    assert check(map(json.loads, history._file.getvalue().splitlines())).kinds == {"lost"}
