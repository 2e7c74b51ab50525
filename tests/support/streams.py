"""Fake clients of the responder."""

import json
import threading
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.request import GenerateRequest, TokenDelta
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.token_outputs import TokenLogprob
from paged_backend.engine.outputs import PoolMap, StepOutput
from paged_backend.kv.blocks import BlockManager
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.server.streams.stream import Sample, Stream
from paged_backend.server.wire.call import Call
from paged_backend.server.wire.channel import ServerChannel
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
        call = Call("x", None, {}, stream, echo=False, timeout_us=0)
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


STATS = Scheduler(BlockManager(4, BlockLayout(16)), max_num_seqs=4, max_num_batched_tokens=16).stats.having(
    running=1, blocks_used=2, blocks_cached=1, blocks_shared=1, cached_tokens=5, compilations=0, sleeping=False
)


POOL = PoolMap(12.5, "12c.", 20, STATS)


def step(key, text, finish=None):
    tokens = tuple(TOKENIZER.encode(text, add_special_tokens=False))
    return StepOutput((TokenDelta(key, tokens, finish),), STATS, 1.0)


class LogprobsClient(Client):
    """A client that asks for logprobs. `got` has (their tokens, cumulative logprob, whether it was final)."""

    def __init__(self, key, stop=()):
        super().__init__(key, stop=stop)
        asked = SamplingParams(max_tokens=99, logprobs=0)
        self.stream.request = replace(self.stream.request, sampling=asked)
        self.stream.call = replace(self.stream.call, returns=frozenset({"logprobs", "cumulative_logprob"}))
        for sample in self.stream.samples:
            sample.values = {"logprobs": []}

    def send(self, response, flags):
        self.sending.set()
        assert self.may_send.wait(WAIT)
        tensors = dict(response[0])
        tokens = [int(token) for entries in json.loads(tensors["logprobs"][0]) for token in entries]
        self.got.put((TOKENIZER.decode(tokens), tensors["cumulative_logprob"].tolist(), flags == 1))


def step_with_logprobs(key, text, finish=None):
    """Return a step whose tokens have a logprob of -0.5 each."""
    output = step(key, text, finish)
    (delta,) = output.deltas
    recorded = tuple((TokenLogprob(token, -0.5, 1),) for token in delta.token_ids)
    return replace(output, deltas=(delta._replace(values={"logprobs": recorded}),))


def failing_once(client, name):
    """Make a method of the client raise when it is first called."""
    works = getattr(client, name)

    def fails(*_, **__):
        setattr(client, name, works)
        raise RuntimeError("the pipe broke")

    setattr(client, name, fails)
