"""The stress tests of a server, with a random seed, and the checks after each of them."""

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
from tests.support.stress.checker import Verdict, check
from tests.support.stress.clients import TIMEOUT, Clients
from tests.support.stress.footprint import Memory, busy_seconds, resident, slope
from tests.support.stress.history import History, load
from tests.support.stress.kill_client import kill_clients
from tests.support.stress.models import Models
from tests.support.stress.multiplexed import MultiplexedClients
from tests.support.stress.plans import Plan, plan_killed_clients, plans
from tests.support.stress.requests import MODEL, make_requests, record_expected
from tests.support.stress.server import FLOOR, Log, Server, counters, footprint, held, wait_until_idle
from tests.support.waiting import until

OPEN = 96  # concurrent requests: three times as many as the server runs at once
FEW = 8  # concurrent requests that do not compete for two cores
CLIENTS_PER_PROCESS = 20  # requests of a process that is killed
HELD_STREAMS = 10
CYCLE_MIB = 1  # growth of the server per load, in the second half of many
LAST_STREAMS = 24  # open at SIGTERM
MAX_ACCEPTED = 500  # connections that a server may accept after the signal to stop, while it starts to
STREAM_SECONDS = 1800  # time limit for thousands of streams
KILL_EVERY = 10_000  # responses of a soak test
IDLE_WITHIN = 10.0  # seconds. The goal is 2, as in the table, but other programs may run on the same cores


class StressTest:
    """The stress tests of one server. Each has its own history, and ends with an idle server and a probe request.

    tritonserver 2.51 sometimes keeps a gRPC stream that its client has cancelled, one of hundreds to thousands: all its
    requests have ended, but the socket stays open. At SIGTERM the server waits for it until its exit timeout and exits
    with 1. Later versions fix races of this kind (triton-inference-server/server#7840, #8078). So if gRPC streams are
    cancelled, the footprint of the server's own process is not checked, and the server is not stopped with SIGTERM.

    Args:
        cancels: whether gRPC streams are cancelled.
        timeout: seconds that clients wait for the end of a request, and for the server to be idle after a test.
        log: log of the server, for the times at which blocks are freed, and for exceptions.
        report: called with the progress of long tests.
        control: whether failures are expected, so that they do not count in the table.
        hours: time limit of each test.
    """

    def __init__(
        self,
        server: Server,
        directory: Path,
        seed: int,
        *,
        cancels: bool = False,
        requests: int = 96,
        timeout: float = TIMEOUT,
        log: Log | None = None,
        report: Callable[[str], None] = print,
        control: bool = False,
        hours: float = math.inf,
    ) -> None:
        self.report, self._log, self._control = report, log, control
        self.hours, self.was_cut = hours, False  # whether the last test was cut off at this limit
        self.cancels = cancels
        self.server, self.seed = server, seed
        self._directory, self._timeout = directory, timeout
        self._rng, self._names = random.Random(seed), itertools.count()
        short = make_requests(self._rng, requests, prompt=(4, 100), output=(2, 24))
        self.requests = record_expected(server.http_url, short)
        self.long = record_expected(server.http_url, make_requests(self._rng, 8, prompt=(4, 12), output=(90, 120)))
        self._before: dict[str, Any] | None = None
        warm = self._run("warm-up", self._warm_up)
        assert not warm.problems, str(warm)
        self._before = wait_until_idle(server)[1]
        self.regions: int = self._before["shm"]
        if cancels:
            del self._before["processes"]["tritonserver"]

    # --- tests ---

    def steady(self, count: int) -> Verdict:
        """Run requests without faults."""
        return self._run("steady", lambda run: run.play(count, faulty=0, invalid=0))

    def kill(self, count: int) -> Verdict:
        """Kill `count` streams, with every fault in every phase, among others that complete."""
        return self._run("kill", lambda run: run.kill(count))

    def leave(self, count: int) -> Verdict:
        """Kill streams with few concurrent requests, to measure how fast blocks are freed after a disconnect."""
        return self._run("leave", lambda run: run.kill(count, open=FEW))

    def soak(self, responses: int) -> Verdict:
        """Run all kinds of requests and faults until `responses` responses have arrived."""
        return self._run("soak", lambda run: run.soak(responses))

    def hold(self, count: int) -> Verdict:
        """Open at least `count` concurrent requests on a few gRPC streams, then cancel all of them."""
        assert self.cancels
        return self._run("hold", lambda run: run.hold(count), idle_within=self._timeout)

    def stream(self, count: int, tokens: int) -> Verdict:
        """Run `count` requests on a few gRPC streams, with a server that runs all of them at once.

        They are long enough for the first ones to be still running when the last ones start.
        """
        longest = make_requests(self._rng, 16, prompt=(4, 8), output=(tokens, tokens))
        longest = [replace(request, sampling=request.sampling | {"ignore_eos": True}) for request in longest]
        answered = record_expected(self.server.http_url, longest)
        self.long = [one for one in answered if list(map(len, one.tokens)) == [one.sampling["max_tokens"]]]
        return self._run("stream", lambda run: run.stream(count))

    def exhaust_pool(self, preemptions: int) -> Verdict:
        """Run long outputs until `preemptions` requests were preempted."""
        return self._run("exhaust_pool", lambda run: run.exhaust_pool(preemptions))

    def reload(self, models: Models, cycles: int) -> Verdict:
        """Unload and load the model, and replace it while it serves, `cycles` times each.

        Files and sockets of its process are not part of the footprint, because it inherits those that tritonserver has
        open when it starts, such as connections of clients.
        """
        assert self._before
        for name, one in self._before["processes"].items():
            if name != "tritonserver":
                del one["sockets"], one["files"]
        return self._run("reload", lambda run: run.reload(models, cycles))

    def crash(self) -> Verdict:
        """Kill the server and its processes with SIGKILL while streams are open."""
        return self._run("crash", lambda run: run.crash(), last=True)

    def stop(self) -> Verdict:
        """Stop the server with SIGTERM while streams are open: they complete, and the server exits cleanly."""
        return self._run("stop", lambda run: run.stop(), last=True)

    # --- implementation ---

    def seed_of_next(self) -> int:
        return self._rng.getrandbits(32)

    def name(self, what: str) -> str:
        return f"{what}{next(self._names)}-"

    def _run(
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
                seconds, after = wait_until_idle(self.server, self._before, timeout=self._timeout)
                history.add("idle", seconds=seconds, before=self._before, after=after)
                asyncio.run(self._under(history, figures, lambda run: run.probe()))
            for id, at in self._log.drops() if self._log else ():
                history.add("freed", id=id, at=at)
            for what in self._log.raised() if self._log else ():
                history.add("raised", what=what)
        verdict = check(load(file), idle_within=idle_within)
        print(f"{name}, seed {self.seed}, {file}: {verdict}\n{figures or ''}")
        if self._before is not None and not self._control:
            table.add_run(name, self.seed, verdict, figures)
        return verdict

    async def _under(
        self, history: History, figures: dict[str, float], what: Callable[[StressRun], Awaitable[None]]
    ) -> None:
        clients = Clients(self.server.http_port, self.server.grpc_url, history, timeout=self._timeout)
        run = StressRun(self, clients, history, figures)
        await what(run)
        self.was_cut |= run.is_over
        await clients.close()

    async def _warm_up(self, run: StressRun) -> None:
        """Let the server allocate what it keeps after its first requests: threads and memory."""
        await run.play(2 * OPEN, faulty=0.3)
        await run.kill_client_processes(1)


class StressRun:
    """One stress test while it runs."""

    def __init__(self, stress: StressTest, clients: Clients, history: History, figures: dict[str, float]):
        self._stress, self._server = stress, stress.server
        self._clients, self._history = clients, history
        self._figures = figures
        self._over_at = time.monotonic() + 3600 * stress.hours

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._over_at

    async def play(self, count: int, **shares: float) -> None:
        """Run `count` requests. `shares` are the shares of `plans`."""
        some = self._plans("play", **shares)
        await self._clients.play_all(itertools.islice(some, count), open=OPEN)

    async def probe(self) -> None:
        plan = Plan(self._stress.name("probe"), "grpc", self._stress.requests[0])
        self._history.add("probe", id=plan.id)
        await self._clients.play(plan)

    async def kill(self, count: int, *, open: int = OPEN) -> None:
        """Run requests until `count` of them were killed. Some complete before that."""
        some = self._plans("kill", faulty=0.9)
        await asyncio.gather(
            self._clients.play_all(some, open=open, until=lambda: self._history.killed >= count or self.is_over),
            self.kill_client_processes(max(1, count // 10 // CLIENTS_PER_PROCESS)),
        )

    async def soak(self, responses: int) -> None:
        started, memory, history = time.monotonic(), Memory(self._server.pid), self._history

        def enough() -> bool:
            return history.responses >= responses or self.is_over

        async def inject_faults() -> None:
            """Kill client processes by the number of responses, so that a slow machine has as many."""
            for number in range(0, responses, KILL_EVERY):
                while history.responses < number and not enough():
                    await asyncio.sleep(0.05)
                if number and enough():
                    return
                await self.kill_client_processes(1)
                if number:
                    seconds = time.monotonic() - started
                    self._stress.report(f"soak: {history.responses:,} of {responses:,} responses in {seconds:.0f} s")

        watch = asyncio.ensure_future(memory.watch())
        some = self._plans("soak", long=None, faulty=0.1)
        await asyncio.gather(self._clients.play_all(some, open=OPEN, until=enough), inject_faults())
        watch.cancel()
        self._figures["seconds"] = time.monotonic() - started
        self._figures |= {f"MiB/min of {name}": growth for name, growth in memory.slopes().items()}

    async def exhaust_pool(self, preemptions: int) -> None:
        before = counters(self._server)["preemptions"]

        def enough() -> bool:
            return self._figures.get("preemptions", 0) >= preemptions or self.is_over

        async def watch() -> None:
            while not enough():
                now = await asyncio.to_thread(counters, self._server)
                self._figures["preemptions"] = now["preemptions"] - before
                await asyncio.sleep(0.05)

        some = self._plans("exhaust_pool", long=True, faulty=0.05)
        await asyncio.gather(self._clients.play_all(some, open=OPEN, until=enough), watch())

    async def hold(self, count: int) -> None:
        """Measure the engine, and a model that does nothing but hold requests."""
        with open(os.devnull, "w") as nowhere:
            floor = await self._hold(count, FLOOR, History(nowhere))
        ours = await self._hold(count, MODEL, self._history)
        self._figures |= {f"{name}, floor": value for name, value in floor.items()} | ours
        for name in floor.keys() - {"held at once"}:
            if floor[name]:
                self._figures[f"{name}, over the floor"] = ours[name] / floor[name]

    async def stream(self, count: int) -> None:
        started, crowd = time.monotonic(), MultiplexedClients(self._server.grpc_url, self._history, MODEL)
        some = self._plans("stream", long=True, faulty=0, invalid=0, pauses=0)
        for _ in range(HELD_STREAMS):
            await crowd.open(itertools.islice(some, count // HELD_STREAMS))
        await asyncio.wait_for(crowd.finish(), STREAM_SECONDS)
        self._figures["seconds"] = time.monotonic() - started

    async def _hold(self, count: int, model: str, history: History) -> dict[str, float]:
        """Open `count` concurrent requests, cancel them, and return the seconds and the CPU time of both."""
        crowd = MultiplexedClients(self._server.grpc_url, history, model)
        some = self._plans("held", long=True, faulty=0, invalid=0, pauses=0)
        leaving = (replace(plan, allowed_ends=("left",), fault="cancel", phase=None) for plan in some)
        started, spent = time.monotonic(), self._spent(model)
        for _ in range(HELD_STREAMS):
            await crowd.open(itertools.islice(leaving, count // HELD_STREAMS))
        while (most := await self._held(model)) < count:
            assert time.monotonic() < started + 120, f"{most} of {count} requests are held"
            if crowd.num_open < count + OPEN:  # some have ended by now
                await crowd.open(itertools.islice(leaving, count + 2 * OPEN - crowd.num_open))
        left, sent = time.monotonic(), self._spent(model)
        going = asyncio.ensure_future(crowd.leave())
        while await self._held(model):
            assert time.monotonic() < left + 120, "cancelled requests are still held"
        gone, ended = time.monotonic(), self._spent(model)
        await going
        found = {"held at once": most, "seconds to send": left - started, "seconds from cancelled to none": gone - left}
        for what, before, after in (("to send", spent, sent), ("from cancelled to none", sent, ended)):
            found |= {f"processor seconds of {who} {what}": after[who] - before[who] for who in before}
        return found

    async def _held(self, model: str) -> int:
        await asyncio.sleep(0.05)
        return await asyncio.to_thread(held, self._server, model)

    def _spent(self, model: str) -> dict[str, float]:
        """Return CPU seconds."""
        busy = busy_seconds(self._server.pid)
        return {"clients": time.process_time(), "server": busy["tritonserver"], "model": busy[f"stub of {model}"]}

    async def reload(self, models: Models, cycles: int) -> None:
        """Run requests without cancellations (see clients.GrpcWire) while the model is reloaded."""
        done = False
        some = self._plans("reload", faulty=0, invalid=0)
        patient = (replace(plan, allowed_ends=("SERVER", "UNAVAILABLE")) for plan in some)
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
            self._stress.report(f"reload: {number + 1} of {cycles} cycles")
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
        """Wait for more responses from the instance that is loaded."""
        responses = self._history.responses + OPEN
        while self._history.responses < responses:
            await asyncio.sleep(0.02)

    def _after_cycle(self, number: int) -> int:
        """Record the footprint once the old instance has ended, and return the server's memory in bytes."""
        before, found = self._stress.regions, {}

        def alone() -> bool:
            found.update(footprint(self._server.pid, self._server.shm_prefix))
            return found["shm"] == before and len(found["processes"]) == 2

        with suppress(AssertionError):  # the checker reports what remains
            until(alone, "the end of the old instance")
        stubs = len(found["processes"]) - 1
        self._history.add("cycle", number=number, stubs=stubs, shm=found["shm"], before=before)
        return resident(self._server.pid)["tritonserver"]

    async def _last(self) -> tuple[set[str], asyncio.Future[None]]:
        """Start streams with long outputs. Return their ids, and a future for their end."""
        some = self._plans("last", long=True, faulty=0, invalid=0, pauses=0)
        plans = [replace(plan, allowed_ends=("left",)) for plan in itertools.islice(some, LAST_STREAMS)]
        ids = {plan.id for plan in plans}
        playing = asyncio.ensure_future(self._clients.play_all(plans, open=LAST_STREAMS))
        while not ids <= self._history.started and not playing.done():
            await asyncio.sleep(0.005)
        return ids, playing

    async def crash(self) -> None:
        ids, playing = await self._last()
        self._server.kill()
        playing.cancel()  # before any client notices
        await asyncio.gather(playing, return_exceptions=True)
        for id in sorted(ids - self._history.ended):
            self._history.add("terminal", id=id, how="left", fault="crash")

    async def stop(self) -> None:
        _, playing = await self._last()
        self._server.terminate()
        refused, accepted = False, 0
        while not (refused or playing.done()):
            refused = await asyncio.to_thread(self._rejects_connections)
            accepted += not refused
            await asyncio.sleep(0.005)
        if refused or accepted > MAX_ACCEPTED:  # else the streams may have ended before the server saw the signal
            self._history.add("refusal", refused=refused)
        await playing
        await self._clients.close()
        started = time.monotonic()
        code = await asyncio.to_thread(self._end)
        left = footprint(self._server.pid, self._server.shm_prefix)["shm"]
        self._history.add("stopped", code=code, seconds=time.monotonic() - started, left=left)

    async def kill_client_processes(self, count: int, every: float = 0.0) -> None:
        """Start and kill processes with many clients."""
        for number in range(count):
            await asyncio.sleep(every if number else 0)
            if number and self.is_over:
                return
            seed = self._stress.seed_of_next()
            name, cancels = self._stress.name("killed"), self._stress.cancels
            killed = plan_killed_clients(
                seed, self._stress.requests, name=name, count=CLIENTS_PER_PROCESS, cancels=cancels
            )
            await kill_clients(self._server, killed, self._history, random.Random(seed))

    def _plans(self, name: str, *, long: bool | None = False, **shares: float) -> Any:
        """Return plans for requests with long outputs, with short ones, or for `long=None` with both."""
        short, long_ones = self._stress.requests, self._stress.long
        requests = {True: long_ones, False: short, None: [*short, *long_ones]}[long]
        name = self._stress.name(name)
        return plans(self._stress.seed_of_next(), requests, name=name, cancels=self._stress.cancels, **shares)

    def _rejects_connections(self) -> bool:
        """Return whether the server rejects a new connection."""
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
