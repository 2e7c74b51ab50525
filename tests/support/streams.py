"""Fake clients of the responder."""

import threading
from dataclasses import fields
from queue import SimpleQueue
from types import SimpleNamespace

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.outputs import PoolMap
from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.server.channel import ServerChannel
from paged_backend.server.sample import Sample
from paged_backend.server.stream import Stream
from paged_backend.server.wire.call import Call
from paged_backend.text.detokenizer import Detokenizer
from tests.support.in_process import WAIT, byte_tokenizer
from tests.support.pb_utils import PB_UTILS

TOKENIZER = byte_tokenizer()


class Client:
    """An open stream whose responses are collected in `got`: (text, error, whether it was final)."""

    def __init__(self, key, stream=True, stop=()):
        self.cancelled = False
        self.sending = threading.Event()
        self.may_send = threading.Event()
        self.may_send.set()
        self.got = SimpleQueue()
        self.decoded = []
        call = Call("x", None, {}, stream, False, False, False, False, False, timeout_us=0)
        request = GenerateRequest(key, (120,), SamplingParams(max_tokens=99), 0, frozenset())
        channel = ServerChannel(PB_UTILS, SimpleNamespace(get_response_sender=lambda: self))
        sample = Sample(Detokenizer(self.decode, [120], stop=stop), False)
        self.stream = Stream(request, call, channel, [sample], 0.0, list, str)

    def decode(self, ids):
        self.decoded.append(ids)
        return TOKENIZER.decode(ids)

    def is_cancelled(self):
        return self.cancelled

    def send(self, response, flags):
        self.sending.set()
        assert self.may_send.wait(WAIT)
        tensors, error = response
        text = dict(tensors)["text_output"][0].decode() if tensors else None
        self.got.put((text, error and error.text, flags == 1))


NOTHING = dict.fromkeys((spec.name for spec in fields(SchedulerStats)), 0)


STATS = SchedulerStats(**NOTHING | {"running": 1, "blocks_total": 4, "blocks_used": 2, "blocks_cached": 1,
                                    "blocks_shared": 1, "block_size": 16, "cached_tokens": 5})  # fmt: skip


POOL = PoolMap(12.5, "12c.", 20, STATS)
