"""A fake of the module triton_python_backend_utils, as strict as that of the newest python_backend (release 26.07).

Its classes are compiled: they take these arguments and no others, and refuse values that do not fit.
"""

from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np

from paged_backend.server.wire.channel import ServerChannel
from tests.support.in_process import WAIT


class Metric:
    def __init__(self, kind):
        self.kind, self.total = kind, 0.0

    def set(self, value):
        assert self.kind == "GAUGE"
        self.total = float(value)

    def increment(self, value):
        assert self.kind == "GAUGE" or (self.kind == "COUNTER" and value >= 0)
        self.total += float(value)

    def observe(self, value):
        assert self.kind == "HISTOGRAM"
        self.total += float(value)

    def value(self):
        return self.total


class Family:
    GAUGE, COUNTER, HISTOGRAM = "GAUGE", "COUNTER", "HISTOGRAM"

    def __init__(self, name, description, kind):
        assert isinstance(name, str) and isinstance(description, str)
        self.kind = kind

    def Metric(self, labels=None, buckets=None):
        assert all(isinstance(text, str) for pair in (labels or {}).items() for text in pair)
        assert (self.kind == "HISTOGRAM") == (buckets is not None)
        assert sorted(set(buckets or ())) == list(buckets or ())
        return Metric(self.kind)


class Error:
    CANCELLED, INTERNAL, INVALID_ARG, UNAVAILABLE = "CANCELLED", "INTERNAL", "INVALID_ARG", "UNAVAILABLE"

    def __init__(self, text, code):
        self.text = text


def tensor(name, array, /):
    """Return a fake tensor. Text is an array of objects: others of numpy's types for text have none of Triton's."""
    assert isinstance(name, str) and isinstance(array, np.ndarray)
    assert array.dtype == np.object_ or array.dtype.kind in "biuf"
    return name, array


def response(output_tensors=(), error=None, parameters=None):
    assert parameters is None or isinstance(parameters, dict)
    return output_tensors, error


PB_UTILS = SimpleNamespace(
    MetricFamily=Family,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    Tensor=tensor,
    InferenceResponse=response,
    TritonError=Error,
)


def untraced() -> SimpleNamespace:
    """Return what `trace` of a Triton request returns if the server does not trace it."""
    return SimpleNamespace(get_context=lambda: None)


class Sent(SimpleQueue):
    """The responses of one client: (tensors by name, error text, whether it was final)."""

    def __init__(self, trouble=0):
        self.trouble = trouble  # number of sends that fail

    def send(self, response, flags):
        if self.trouble:
            self.trouble -= 1
            raise RuntimeError("the pipe broke")
        tensors, error = response
        self.put((dict(tensors), error and error.text, flags == 1))

    def channel(self):
        return ServerChannel(PB_UTILS, SimpleNamespace(get_response_sender=lambda: self))

    def the_only(self):
        got = self.get(timeout=WAIT)
        assert self.empty()
        return got
