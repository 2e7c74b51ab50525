"""The engine without a server, for benchmarks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

from paged_backend.api.request import GenerateRequest
from paged_backend.engine.assembly import Assembly
from paged_backend.engine.engine import Engine
from paged_backend.engine.outputs import EngineDied, EngineOutput, StepOutput


def serve(
    assembly: Assembly, requests: Sequence[GenerateRequest], arrivals: Sequence[float] | None = None
) -> Iterator[StepOutput]:
    """What every step gives until the last request has ended. They are put in all at once, or each at its time of
    `arrivals`, in seconds. The engine has a thread of its own, as in the server. Raises RuntimeError where it or a
    request fails."""
    steps: SimpleQueue[EngineOutput] = SimpleQueue()
    engine = assembly.engine(steps.put)
    engine.start()
    if arrivals is None:
        for request in requests:
            engine.submit(request)
    else:
        threading.Thread(target=_submit, args=(engine, requests, arrivals), daemon=True).start()
    left = sum(request.sampling.n for request in requests)
    while left:
        output = steps.get()
        if isinstance(output, EngineDied):
            raise RuntimeError(output.reason)
        assert isinstance(output, StepOutput)
        for delta in output.deltas:
            if delta.error:
                raise RuntimeError(str(delta.error))
            left -= delta.last
        yield output
    engine.stop()


def _submit(engine: Engine, requests: Sequence[GenerateRequest], arrivals: Sequence[float]) -> None:
    started = time.monotonic()
    for request, arrival in zip(requests, arrivals, strict=True):
        time.sleep(max(0.0, started + arrival - time.monotonic()))
        engine.submit(request)
