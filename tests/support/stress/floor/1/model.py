"""A model that only holds requests until their clients disconnect, to measure the cost of the server itself."""

import itertools
import threading
from collections import deque
from queue import Empty, SimpleQueue

import triton_python_backend_utils as pb_utils

from paged_backend.server import triton_model

POLL_SECONDS = 0.02
POLL_BATCH = 64  # requests polled at a time; the next ones immediately if one was cancelled


class TritonPythonModel:
    auto_complete_config = staticmethod(triton_model.TritonPythonModel.auto_complete_config)

    def initialize(self, args):
        metrics = pb_utils.MetricFamily
        self._family = metrics(name="floor_requests", description="Open requests", kind=metrics.GAUGE)
        self._shown = self._family.Metric(labels={"model": args["model_name"]})
        self._arrived, self._stopping = SimpleQueue(), threading.Event()
        self._thread = threading.Thread(target=self._hold)
        self._thread.start()

    def execute(self, requests):
        for request in requests:
            self._arrived.put(request.get_response_sender())

    def finalize(self):
        self._stopping.set()
        self._thread.join()

    def _hold(self):
        held, count, cancelled = deque(), 0, 0
        while not self._stopping.wait(0 if cancelled else POLL_SECONDS):
            try:
                while True:
                    held.append(self._arrived.get_nowait())
            except Empty:
                pass
            polled = [held.popleft() for _ in range(min(POLL_BATCH, len(held)))]
            cancelled = [sender for sender in polled if sender.is_cancelled()]
            held.extend(itertools.filterfalse(set(cancelled).__contains__, polled))
            for sender in cancelled:
                error = pb_utils.TritonError("CANCELLED", pb_utils.TritonError.CANCELLED)
                response = pb_utils.InferenceResponse(output_tensors=[], error=error)
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            if len(held) != count:
                count = len(held)
                self._shown.set(count)
