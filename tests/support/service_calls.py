"""Calls to a service without a server, and control of its engine steps, clock and outcomes."""

import json
import time
from queue import SimpleQueue
from threading import Semaphore

from paged_backend.execution.runner import Runner
from paged_backend.server.metrics.metrics import Metrics
from tests.support.callers import Caller
from tests.support.in_process import WAIT


class Gate:
    """Holds every step before it is launched."""

    def __init__(self, monkeypatch):
        self._permits, self._held, launch = Semaphore(0), SimpleQueue(), Runner.launch
        self._is_open = False

        def held(runner, packed):
            self._held.put(None)
            if not self._is_open:
                self._permits.acquire()
            return launch(runner, packed)

        monkeypatch.setattr(Runner, "launch", held)

    def wait(self):
        """Wait until a step is held."""
        self._held.get(timeout=WAIT)

    def step(self, count=1):
        """Release this many steps, and wait until the next one is held."""
        for _ in range(count):
            self.release()
            self.wait()

    def release(self):
        self._permits.release()

    def open(self):
        """Release the steps that are held, and hold none from now on."""
        self._is_open = True
        self._permits.release(100)  # more than there are runners; of a million the release alone takes a second


class SingleCaller(Caller):
    """A non-streaming request. own: fields of the Triton request besides its tensors."""

    def __init__(self, service, own=None, **inputs):
        super().__init__(**inputs)
        for name, value in (own or {}).items():
            setattr(self, name, lambda value=value: value)
        service.submit(self)

    def answer(self):
        """Return the outputs, or the error."""
        outputs, error, last = self.get(timeout=WAIT)
        assert last
        assert self.empty()
        return error or outputs


RETURNED = {"return_finish_reason": True, "return_num_output_tokens": True}


def ask(service, text="abcd", own=None, **sampling):
    sampling = {"max_tokens": 9, "temperature": 0, "ignore_eos": True} | sampling
    return SingleCaller(service, own, text_input=text, sampling_parameters=json.dumps(sampling), **RETURNED)


def finish(asked):
    answer = asked.answer()
    return answer["finish_reason"][0].decode(), answer["num_output_tokens"][0]


UNHELD = Runner.launch


class Clock:
    def __init__(self):
        self.ahead = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead


HOUR = 3_600_000  # milliseconds


def counted(monkeypatch, event):
    """Return a list that gets the label of each event that a service counts."""
    found, count = [], Metrics.count

    def record(self, name, amount=1, label=""):
        if name == event:
            found.append(label)
        count(self, name, amount, label)

    monkeypatch.setattr(Metrics, "count", record)
    return found


def outcomes(monkeypatch):
    """Return a list that gets the outcome of each request."""
    return counted(monkeypatch, "finished")


def stop(service, name, **beside):
    return SingleCaller(service, {"request_id": name}, stop_request=True, **beside)
