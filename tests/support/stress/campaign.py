"""A server and a seed: the storms, and what is held against each afterwards."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.stress import table
from tests.support.stress.asks import MODEL, catalogue, record_expected
from tests.support.stress.checker import Verdict, check
from tests.support.stress.clients import PATIENCE, Clients
from tests.support.stress.crowd import MultiplexedClients
from tests.support.stress.footprint import Memory, busy_seconds, resident, slope
from tests.support.stress.history import History, load
from tests.support.stress.kill_client import kill_clients
from tests.support.stress.models import Models
from tests.support.stress.plans import Plan, plan_killed_clients, plans
from tests.support.stress.server import FLOOR, Log, Server, counters, footprint, held, until, wait_until_idle

OPEN = 96  # requests at the same time: three times as many as the server computes
FEW = 8  # so that nobody waits for a core where there are two
VICTIMS = 20  # requests of a process that is killed
HELD_STREAMS = 10
CYCLE_MIB = 1  # that the server may grow by with each load, in the second half of many
LAST_STREAMS = 24  # open at SIGTERM
STREAM_SECONDS = 1800  # that thousands may stream for
MURDER_EVERY = 10_000  # responses of a soak
IDLE_WITHIN = 10.0  # seconds. The goal is 2, which the table is to be read for: other things may run on the same cores


class StressTest:
    """Over one server. Every storm has a history of its own, and ends with an idle server and a probe.

    tritonserver 2.51 now and then keeps a gRPC stream that its client has cancelled, one of some hundreds to thousands:
    the model has ended all of its requests and the server counts them as done, but the socket stays open, and at
    SIGTERM the server waits for it until its exit timeout and exits with 1. Later ones mend races of this kind
    (triton-inference-server/server#7840, #8078). So where gRPC streams are cancelled all but the server's own process
    is held to what it had before, and it is not asked to stop.
    """

    def __init__(
        self,
        server: Server,
        directory: Path,
        seed: int,
        *,
        cancels: bool = False,
        asks: int = 96,
        patience: float = PATIENCE,
        log: Log | None = None,
        tell: Callable[[str], None] = print,
        control: bool = False,
        hours: float = math.inf,
    ):
        """cancels: whether gRPC streams are. patience: seconds that clients wait for an end, and the end of a storm for
        an idle server. log: the server's own, to see how long blocks are held after a client has left, and that nothing
        is raised. tell: gets a line now and then of what goes on for long. control: what goes wrong does so on purpose,
        and is no result. hours: that a storm may last, however much more was asked of it."""
        self.tell, self._log, self._control = tell, log, control
        self.hours, self.was_cut = hours, False  # whether the last storm came to the end of them
        self.cancels = cancels
        self.server, self.seed = server, seed
        self._directory, self._patience = directory, patience
        self._dice, self._names = random.Random(seed), itertools.count()
        self.asks = record_expected(server.http_url, catalogue(self._dice, asks, prompt=(4, 100), output=(2, 24)))
        self.long = record_expected(server.http_url, catalogue(self._dice, 8, prompt=(4, 12), output=(90, 120)))
        self._before: dict[str, Any] | None = None
        warm = self._weather("warm-up", self._warm_up)
        assert not warm.problems, str(warm)
        self._before = wait_until_idle(server)[1]
        self.regions: int = self._before["shm"]
        if cancels:
            del self._before["processes"]["tritonserver"]

    # --- storms ------------------------------------------------------------------------------------------------------

    def calm(self, count: int) -> Verdict:
        """Requests that all wait for their end."""
        return self._weather("calm", lambda here: here.play(count, kills=0, bad=0))

    def kill(self, count: int) -> Verdict:
        """So many streams, in every phase and way, among others that go on to their end."""
        return self._weather("kill", lambda here: here.kill(count))

    def leave(self, count: int) -> Verdict:
        """The same of a server that has time: how long it holds the blocks of who has left."""
        return self._weather("leave", lambda here: here.kill(count, open=FEW))

    def soak(self, responses: int) -> Verdict:
        """All kinds of things at once, until so many responses have come."""
        return self._weather("soak", lambda here: here.soak(responses))

    def hold(self, count: int) -> Verdict:
        """At least so many requests at the same time, from a few gRPC streams; then all are cancelled."""
        assert self.cancels
        return self._weather("hold", lambda here: here.hold(count), idle_within=self._patience)

    def stream(self, count: int, tokens: int) -> Verdict:
        """So many requests on a few gRPC streams, of a server that computes all of them at once, until all have ended:
        so long that the first go on when the last begin."""
        longest = catalogue(self._dice, 16, prompt=(4, 8), output=(tokens, tokens))
        longest = [replace(ask, sampling=ask.sampling | {"ignore_eos": True}) for ask in longest]
        answered = record_expected(self.server.http_url, longest)
        self.long = [ask for ask in answered if list(map(len, ask.tokens)) == [ask.sampling["max_tokens"]]]
        return self._weather("stream", lambda here: here.stream(count))

    def dry(self, preemptions: int) -> Verdict:
        """Long outputs, until so many requests were sent back to the queue."""
        return self._weather("dry", lambda here: here.dry(preemptions))

    def reload(self, models: Models, cycles: int) -> Verdict:
        """The model is unloaded and loaded, and replaced while it serves, so many times each. Its new process inherits
        whatever the server has open while it starts, its clients' connections: that is tritonserver's own doing."""
        assert self._before
        for name, one in self._before["processes"].items():
            if name != "tritonserver":
                del one["sockets"], one["files"]
        return self._weather("reload", lambda here: here.reload(models, cycles))

    def crash(self) -> Verdict:
        """SIGKILL for the server and its processes, while streams are open."""
        return self._weather("crash", lambda here: here.crash(), last=True)

    def stop(self) -> Verdict:
        """SIGTERM while streams are open: they end, the server ends, and nothing is left."""
        return self._weather("stop", lambda here: here.stop(), last=True)

    # --- how ---------------------------------------------------------------------------------------------------------

    def seed_of_next(self) -> int:
        return self._dice.getrandbits(32)

    def name(self, what: str) -> str:
        return f"{what}{next(self._names)}-"

    def _weather(
        self,
        name: str,
        what: Callable[[StressRun], Awaitable[None]],
        *,
        last: bool = False,
        idle_within: float = IDLE_WITHIN,
    ) -> Verdict:
        file = self._directory / f"{self.name(name)}{self.seed}.jsonl"
        self.was_cut = False
        with file.open("w", buffering=1 << 16) as stream:
            history, figures = History(stream), {}
            asyncio.run(self._under(history, figures, what))
            if self._before is not None and not last:
                seconds, after = wait_until_idle(self.server, self._before, patience=self._patience)
                history.add("idle", seconds=seconds, before=self._before, after=after)
                asyncio.run(self._under(history, figures, lambda here: here.probe()))
            for id, at in self._log.drops() if self._log else ():
                history.add("freed", id=id, at=at)
            for what in self._log.raised() if self._log else ():
                history.add("raised", what=what)
        verdict = check(load(file), idle_within=idle_within)
        print(f"{name}, seed {self.seed}, {file}: {verdict}\n{figures or ''}")
        if self._before is not None and not self._control:
            table.book(name, self.seed, verdict, figures)
        return verdict

    async def _under(
        self, history: History, figures: dict[str, float], what: Callable[[StressRun], Awaitable[None]]
    ) -> None:
        clients = Clients(self.server.http_port, self.server.grpc_url, history, patience=self._patience)
        here = StressRun(self, clients, history, figures)
        await what(here)
        self.was_cut |= here.is_over
        await clients.close()

    async def _warm_up(self, here: StressRun) -> None:
        """What a server keeps once it was used: threads that wait for more, memory."""
        await here.play(2 * OPEN, kills=0.3)
        await here.murders(1)


class StressRun:
    """One storm while it goes on."""

    def __init__(self, storm: StressTest, clients: Clients, history: History, figures: dict[str, float]):
        self._storm, self._server = storm, storm.server
        self._clients, self._history = clients, history
        self._figures = figures
        self._over_at = time.monotonic() + 3600 * storm.hours

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._over_at

    async def play(self, count: int, **shares: float) -> None:
        """shares: of those that do not just wait, see `plans`."""
        some = self._plans("play", **shares)
        await self._clients.play_all(itertools.islice(some, count), open=OPEN)

    async def probe(self) -> None:
        plan = Plan(self._storm.name("probe"), "grpc", self._storm.asks[0])
        self._history.add("probe", id=plan.id)
        await self._clients.play(plan)

    async def kill(self, count: int, *, open: int = OPEN) -> None:
        """Some end before they can be killed."""
        some = self._plans("kill", kills=0.9)
        await asyncio.gather(
            self._clients.play_all(some, open=open, until=lambda: self._history.killed >= count or self.is_over),
            self.murders(max(1, count // 10 // VICTIMS)),
        )

    async def soak(self, responses: int) -> None:
        begun, memory, history = time.monotonic(), Memory(self._server.pid), self._history

        def enough() -> bool:
            return history.responses >= responses or self.is_over

        async def nemesis() -> None:
            """Murders by the count of responses, so that a slower machine has as many."""
            for number in range(0, responses, MURDER_EVERY):
                while history.responses < number and not enough():
                    await asyncio.sleep(0.05)
                if number and enough():
                    return
                await self.murders(1)
                if number:
                    seconds = time.monotonic() - begun
                    self._storm.tell(f"soak: {history.responses:,} of {responses:,} responses in {seconds:.0f} s")

        watch = asyncio.ensure_future(memory.watch())
        some = self._plans("soak", long=None, kills=0.1)
        await asyncio.gather(self._clients.play_all(some, open=OPEN, until=enough), nemesis())
        watch.cancel()
        self._figures["seconds"] = time.monotonic() - begun
        self._figures |= {f"MiB/min of {name}": growth for name, growth in memory.slopes().items()}

    async def dry(self, preemptions: int) -> None:
        before = counters(self._server)["preemptions"]

        def enough() -> bool:
            return self._figures.get("preemptions", 0) >= preemptions or self.is_over

        async def watch() -> None:
            while not enough():
                now = await asyncio.to_thread(counters, self._server)
                self._figures["preemptions"] = now["preemptions"] - before
                await asyncio.sleep(0.05)

        some = self._plans("dry", long=True, kills=0.05)
        await asyncio.gather(self._clients.play_all(some, open=OPEN, until=enough), watch())

    async def hold(self, count: int) -> None:
        """By a model that does nothing else, and by the engine."""
        with open(os.devnull, "w") as nowhere:
            floor = await self._hold(count, FLOOR, History(nowhere))
        ours = await self._hold(count, MODEL, self._history)
        self._figures |= {f"{name}, floor": value for name, value in floor.items()} | ours
        for name in floor.keys() - {"held at once"}:
            self._figures[f"{name}, over the floor"] = ours[name] / floor[name]

    async def stream(self, count: int) -> None:
        begun, crowd = time.monotonic(), MultiplexedClients(self._server.grpc_url, self._history, MODEL)
        some = self._plans("stream", long=True, kills=0, bad=0, pauses=0)
        for _ in range(HELD_STREAMS):
            await crowd.open(itertools.islice(some, count // HELD_STREAMS))
        await asyncio.wait_for(crowd.finish(), STREAM_SECONDS)
        self._figures["seconds"] = time.monotonic() - begun

    async def _hold(self, count: int, model: str, history: History) -> dict[str, float]:
        """What it took to send requests until so many were held at once, and from when all were cancelled until none
        was left."""
        crowd = MultiplexedClients(self._server.grpc_url, history, model)
        some = self._plans("held", long=True, kills=0, bad=0, pauses=0)
        leaving = (replace(plan, may=("left",), way="cancel", phase=None) for plan in some)
        begun, spent = time.monotonic(), self._spent(model)
        for _ in range(HELD_STREAMS):
            await crowd.open(itertools.islice(leaving, count // HELD_STREAMS))
        while (most := await self._held(model)) < count:
            assert time.monotonic() < begun + 120, f"{most} of {count} requests are held"
            if crowd.num_open < count + OPEN:  # some have ended by now
                await crowd.open(itertools.islice(leaving, count + 2 * OPEN - crowd.num_open))
        left, sent = time.monotonic(), self._spent(model)
        going = asyncio.ensure_future(crowd.leave())
        while await self._held(model):
            assert time.monotonic() < left + 120, "requests stay that were cancelled"
        gone, ended = time.monotonic(), self._spent(model)
        await going
        found = {"held at once": most, "seconds to send": left - begun, "seconds from cancelled to none": gone - left}
        for what, before, after in (("to send", spent, sent), ("from cancelled to none", sent, ended)):
            found |= {f"processor seconds of {who} {what}": after[who] - before[who] for who in before}
        return found

    async def _held(self, model: str) -> int:
        await asyncio.sleep(0.05)
        return await asyncio.to_thread(held, self._server, model)

    def _spent(self, model: str) -> dict[str, float]:
        """Processor seconds."""
        busy = busy_seconds(self._server.pid)
        return {"clients": time.process_time(), "server": busy["tritonserver"], "model": busy[f"stub of {model}"]}

    async def reload(self, models: Models, cycles: int) -> None:
        """Nobody cancels a stream here: see clients.GrpcWire."""
        done = False
        some = self._plans("reload", kills=0, bad=0)
        patient = (replace(plan, may=("SERVER", "UNAVAILABLE")) for plan in some)
        everybody = self._clients.play_all(patient, open=OPEN // 4, until=lambda: done, rest=0.2)
        playing = asyncio.ensure_future(everybody)
        memory = []
        for number in range(cycles):
            await asyncio.to_thread(models.unload)
            await asyncio.to_thread(models.load)
            await self._goes_on()
            await asyncio.to_thread(models.replace)
            await self._goes_on()
            memory.append((number, await asyncio.to_thread(self._after_cycle, number)))
            self._storm.tell(f"reload: {number + 1} of {cycles} cycles")
            if self.is_over:
                break
        self._figures |= {"unloaded and loaded": len(memory), "replaced": len(memory)}
        if len(memory) >= 4:
            grows = slope(memory[len(memory) // 2 :]) / 2**20
            self._figures["MiB a cycle of tritonserver"] = grows
            self._history.add("grows", by=grows, most=CYCLE_MIB)
        done = True
        await playing

    async def _goes_on(self) -> None:
        """Until some more responses have come from what is loaded now."""
        responses = self._history.responses + OPEN
        while self._history.responses < responses:
            await asyncio.sleep(0.02)

    def _after_cycle(self, number: int) -> int:
        """Notes what there is once the instance before has gone; the server's memory in bytes."""
        before, found = self._storm.regions, {}

        def alone() -> bool:
            found.update(footprint(self._server.pid, self._server.shm_prefix))
            return found["shm"] == before and len(found["processes"]) == 2

        with suppress(AssertionError):  # the checker says what is there
            until(alone, "the end of the instance before")
        stubs = len(found["processes"]) - 1
        self._history.add("cycle", number=number, stubs=stubs, shm=found["shm"], before=before)
        return resident(self._server.pid)["tritonserver"]

    async def _last(self) -> tuple[set[str], asyncio.Future[None]]:
        """Streams that have begun, and go on for a while: their ids, and their end."""
        some = self._plans("last", long=True, kills=0, bad=0, pauses=0)
        plans = [replace(plan, may=("left",)) for plan in itertools.islice(some, LAST_STREAMS)]
        ids = {plan.id for plan in plans}
        playing = asyncio.ensure_future(self._clients.play_all(plans, open=LAST_STREAMS))
        while not ids <= self._history.begun and not playing.done():
            await asyncio.sleep(0.005)
        return ids, playing

    async def crash(self) -> None:
        ids, playing = await self._last()
        self._server.kill()
        playing.cancel()  # before any of them notices
        await asyncio.gather(playing, return_exceptions=True)
        for id in sorted(ids - self._history.ended):
            self._history.add("terminal", id=id, how="left", way="crash")

    async def stop(self) -> None:
        _, playing = await self._last()
        self._server.terminate()
        refused = False
        while not (refused or playing.done()):
            refused = await asyncio.to_thread(self._server_refuses)
            await asyncio.sleep(0.005)
        self._history.add("knocked", refused=refused)
        await playing
        await self._clients.close()
        begun = time.monotonic()
        code = await asyncio.to_thread(self._end)
        left = footprint(self._server.pid, self._server.shm_prefix)["shm"]
        self._history.add("stopped", code=code, seconds=time.monotonic() - begun, left=left)

    async def murders(self, count: int, every: float = 0.0) -> None:
        """Processes full of clients that are killed."""
        for number in range(count):
            await asyncio.sleep(every if number else 0)
            if number and self.is_over:
                return
            seed = self._storm.seed_of_next()
            name, cancels = self._storm.name("victim"), self._storm.cancels
            chosen = plan_killed_clients(seed, self._storm.asks, name=name, count=VICTIMS, cancels=cancels)
            await kill_clients(self._server, chosen, self._history, random.Random(seed))

    def _plans(self, name: str, *, long: bool | None = False, **shares: float) -> Any:
        """long: such as have long outputs; None: those, too."""
        asks = {True: self._storm.long, False: self._storm.asks, None: [*self._storm.asks, *self._storm.long]}[long]
        name = self._storm.name(name)
        return plans(self._storm.seed_of_next(), asks, name=name, cancels=self._storm.cancels, **shares)

    def _server_refuses(self) -> bool:
        """Whether somebody who comes now is let in."""
        try:
            with socket.create_connection(("127.0.0.1", self._server.http_port), timeout=5) as client:
                client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                return not client.recv(1)
        except OSError:
            return True

    def _end(self) -> int | None:
        try:
            return self._server.wait(60)
        except subprocess.TimeoutExpired:
            return None
