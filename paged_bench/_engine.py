"""Runs the engine without a server."""

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
    """Run requests and yield the output of every step until all have finished.

    The engine runs on its own thread, as in the server. Raises RuntimeError if the engine or a request fails.

    Args:
        arrivals: when to submit each request, in seconds; None submits all at once.
    """
    outputs: SimpleQueue[EngineOutput] = SimpleQueue()
    engine = assembly.engine(outputs.put)
    engine.start()
    if arrivals is None:
        for request in requests:
            engine.submit(request)
    else:
        threading.Thread(target=_submit, args=(engine, requests, arrivals), daemon=True).start()
    unfinished = sum(request.sampling.n for request in requests)
    while unfinished:
        output = outputs.get()
        if isinstance(output, EngineDied):
            raise RuntimeError(output.reason)
        assert isinstance(output, StepOutput)
        for delta in output.deltas:
            if delta.error:
                raise RuntimeError(str(delta.error))
            unfinished -= delta.last
        yield output
    engine.stop()


def _submit(engine: Engine, requests: Sequence[GenerateRequest], arrivals: Sequence[float]) -> None:
    started = time.monotonic()
    for request, arrival in zip(requests, arrivals, strict=True):
        time.sleep(max(0.0, started + arrival - time.monotonic()))
        engine.submit(request)
