"""Both sides of an engine in another process, within this one, and a harness that collects each sample's output."""

import socket
import threading
from contextlib import suppress
from queue import SimpleQueue

from paged_backend.api.errors import ErrorCode
from paged_backend.engine.engine_service import EngineService
from paged_backend.utils.local_socket import Connection
from tests.support.in_process import EngineHarness, Output


class Owner:
    def __init__(self):
        self.started, self.ended, self.returned = [], [], SimpleQueue()

    def on_started(self, key):
        self.started.append(key)

    def on_ended(self, key):
        self.ended.append(key)

    def on_returned(self, engine, request, rejected):
        self.returned.put((request, rejected))


class Peer:
    """The other side of the connection, with an engine."""

    def __init__(self, assembly, connection):
        self.assembly, self.own = assembly, SimpleQueue()
        self.service = EngineService(assembly.limits, assembly.loaded.tokenizer, self.own.put)
        self.engine = assembly.engine(self.service.emit)
        self.service.start(self.engine, self.engine.deliver)
        self.client = self.service.connect(self._send, connection.close, connection.max_frame_bytes)
        self.connection = connection
        threading.Thread(target=self._read, daemon=True).start()

    def _send(self, frame):
        with suppress(OSError):
            self.connection.send(frame)

    def _read(self):
        for frame in self.connection.frames():
            assert self.client.handle(frame["id"], frame)
        self.client.close()


def pair():
    return [Connection(end) for end in socket.socketpair()]


class SampleHarness(EngineHarness):
    """Collects the outputs of each sample: `outputs` has the key (request, sample) next to the request."""

    def step(self):
        output = self.steps.get(timeout=60)
        for delta in output.deltas:
            one = self.outputs.setdefault((delta.key, delta.sample), Output())
            assert one.finish is None and one.error is None, "a token after the last"
            one.tokens += delta.token_ids
            one.logprobs += delta.values.get("logprobs", ())
            one.fingerprints += delta.values.get("fingerprints", ())
            if delta.prompt_values is not None:
                one.fingerprints += delta.prompt_values.get("fingerprints", ())
                assert one.prompt_logprobs is None, "the prompt was returned twice"
                one.prompt_logprobs = delta.prompt_values["logprobs"]
            one.finish, one.error = delta.finish, delta.error
            assert not delta.error or delta.error.code is ErrorCode.UNAVAILABLE
        return output

    def collect(self, key, n):
        while not all(self.outputs.get((key, i), Output()).finish for i in range(n)):
            self.step()
            assert not self.outputs.get((key, 0), Output()).error, self.outputs[key, 0].error
        return [self.outputs[key, i] for i in range(n)]
