"""A service without a server: fake Triton requests and response senders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np

from paged_backend.api.config import EngineConfig
from paged_backend.server.service import Service
from tests.support.in_process import TINY, WAIT
from tests.support.pb_utils import PB_UTILS, Error, untraced


class FakeTritonError(Error):
    INVALID_ARG, UNAVAILABLE = "INVALID_ARG", "UNAVAILABLE"


class Caller(SimpleQueue):
    """A fake Triton request, and a queue of its responses: (outputs by name, error text or None, whether it is
    final)."""

    def __init__(self, **inputs: Any):
        self.tensors = [
            SimpleNamespace(name=lambda name=name: name, as_numpy=lambda value=value: value)
            for name, value in ((name, _array(value)) for name, value in inputs.items())
        ]
        self.inputs, self.get_response_sender = lambda: self.tensors, lambda: self
        self.parameters, self.is_cancelled = lambda: "", lambda: False
        self.timeout = self.correlation_id = self.flags = lambda: 0
        self.trace = untraced
        self.request_id = lambda: ""

    def send(self, response: Any, flags: int) -> None:
        tensors, error = response
        outputs = {name: value.tolist() for name, value in tensors or []}
        self.put((outputs, error and error.text, flags == 1))

    def all(self) -> list[dict[str, list[Any]]]:
        """Return the outputs of every response. Fails the test for an error."""
        responses, last = [], False
        while not last:
            outputs, error, last = self.get(timeout=WAIT)
            assert error is None, error
            responses.append(outputs)
        return responses

    def rejection(self) -> str:
        """Return the error that is the only response."""
        _, error, last = self.get(timeout=WAIT)
        assert error and last
        return error


def _array(value: Any) -> np.ndarray:
    if isinstance(value, list):
        return np.array(value, np.int32)
    if isinstance(value, str | bytes):
        return np.array([value.encode() if isinstance(value, str) else value], np.object_)
    return np.array([value])


class Serving:
    """A running service that tests send requests to."""

    def __init__(self, service: Service):
        self.service = service

    def call(self, **inputs: Any) -> Caller:
        """Submit a request."""
        caller = Caller(**inputs)
        self.service.submit(caller)
        return caller

    def ask(self, **inputs: Any) -> dict[str, list[Any]]:
        """Return the outputs of a request that does not stream."""
        (outputs,) = self.call(**inputs).all()
        return outputs


@contextmanager
def serving(
    directory: Path,
    service_class: type[Service] = Service,
    *,
    instance: str | None = None,
    adapters: Path | None = None,
    **options: Any,
) -> Iterator[Serving]:
    """A running service over a tiny model, which stops at the end. instance: Triton's name of it. adapters: the file
    that lists LoRA adapters."""
    pb_utils = SimpleNamespace(**vars(PB_UTILS) | {"TritonError": FakeTritonError})
    config = EngineConfig.from_options({"model": str(directory)} | TINY | options)
    service = service_class(config, pb_utils, {"model": "tiny"}, adapters, instance=instance)
    try:
        yield Serving(service)
    finally:
        service.stop()
