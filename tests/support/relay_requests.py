"""Requests to the relay, and the engine's responses."""

from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np

from paged_backend.server.wire.call import Call
from paged_backend.server.wire.responses import Response, SampleOutput, write_response
from tests.support.in_process import WAIT
from tests.support.pb_utils import untraced

TYPES = {"text_input": np.object_, "max_tokens": np.int32, "stream": np.bool_, "stop": np.bool_}


class Tensor:
    def __init__(self, name, value):
        self.name, self.as_numpy = lambda: name, lambda: value


class Request:
    """A request to `ensemble`, as the Python backend passes it to the model."""

    def __init__(self, name="", **tensors):
        self.got = SimpleQueue()
        made = {"text_input": [["x"]], "max_tokens": [[4]], "stream": [[True]]} | tensors
        self.tensors = [Tensor(key, np.array(value, TYPES[key])) for key, value in made.items()]
        self.cancelled = False
        self.timeout = self.correlation_id = self.flags = lambda: 0
        self.trace = untraced
        self.request_id, self.parameters = lambda: name, lambda: ""

    def inputs(self):
        return self.tensors

    def get_response_sender(self):
        return SimpleNamespace(send=self.send, is_cancelled=lambda: self.cancelled)

    def send(self, response, flags):
        tensors, error = response
        self.got.put((error.text if error else dict(tensors)["text_output"].tolist(), flags == 1))

    def next(self):
        return self.got.get(timeout=WAIT)


def response(text, reason=None):
    call = Call("x", None, {}, stream=True, echo=False, timeout_us=0, returns=frozenset({"finish_reason"}))
    return write_response(Response(call.returns, [SampleOutput(text, reason, ())], prompt_token_ids=()))


def submit(relay, **tensors):
    made = Request(**tensors)
    relay.submit(made)
    return made
