"""The engine without a server, for benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from queue import SimpleQueue

from paged_backend.engine import EngineDied, PoolMap, StepOutput
from paged_backend.request import GenerateRequest
from paged_backend.service import Assembly


def serve(assembly: Assembly, requests: Iterable[GenerateRequest]) -> Iterator[StepOutput]:
    """Put all requests in at once, each of one sample; what every step gives until the last has ended. The engine has
    a thread of its own, as in the server. Raises RuntimeError where it or a request fails."""
    steps: SimpleQueue[StepOutput | PoolMap | EngineDied] = SimpleQueue()
    engine = assembly.engine(steps.put)
    engine.start()
    left = 0
    for request in requests:
        engine.submit(request)
        left += 1
    while left:
        output = steps.get()
        if isinstance(output, EngineDied):
            raise RuntimeError(output.reason)
        for delta in output.deltas:
            if delta.error:
                raise RuntimeError(str(delta.error))
            left -= delta.last
        yield output
    engine.stop()
