"""A fake of the module triton_python_backend_utils."""

from queue import SimpleQueue
from types import SimpleNamespace

from paged_backend.server.channel import ServerChannel
from tests.support.in_process import WAIT


class Metric:
    def __init__(self, **labels):
        self.value = 0.0

    def set(self, value):
        self.value = value

    def increment(self, value):
        self.value += value

    def observe(self, value):
        self.value = value


class Family:
    GAUGE, COUNTER, HISTOGRAM = "GAUGE", "COUNTER", "HISTOGRAM"

    def __init__(self, **description):
        self.Metric = Metric


class Error:
    CANCELLED, INTERNAL, INVALID_ARG, UNAVAILABLE = "CANCELLED", "INTERNAL", "INVALID_ARG", "UNAVAILABLE"

    def __init__(self, text, code):
        self.text = text


PB_UTILS = SimpleNamespace(
    MetricFamily=Family,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    Tensor=lambda name, value: (name, value),
    InferenceResponse=lambda output_tensors, error=None: (output_tensors, error),
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
