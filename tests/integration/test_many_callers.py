"""Hundreds of concurrent requests that finish, are cancelled, are stopped or time out.

There is no server in between, so many more events fall into one iteration of a thread than over a network.
"""

import json
import logging
import random
import threading
from collections import Counter
from itertools import zip_longest

import pytest

from tests.support.callers import Caller, serving
from tests.support.in_process import WAIT
from tests.support.stress.requests import split
from tests.support.waiting import until

OPTIONS = {"num_gpu_blocks_override": 64, "max_num_seqs": 16, "max_queue_size": 0, "first_response_ms": 0}
KINDS = (
    {},
    {"stop_token_ids": [19]},  # sampled by the model
    {"n": 2, "temperature": 1, "seed": 1},
    {"beam_width": 2, "n": 2},
    {"timeout_ms": 50},
)
STOPPED = "CANCELLED: the request was ended by a stop_request"
ERRORS = {STOPPED, "CANCELLED: the request was cancelled by its client"}


class Asked(Caller):
    def __init__(self, name, sampling, stream):
        super().__init__(
            text_input="abcd", stream=stream, return_token_ids=True, return_num_output_tokens=True,
            return_finish_reason=True,
            sampling_parameters=json.dumps({"max_tokens": 8, "temperature": 0, "ignore_eos": True} | sampling),
        )  # fmt: skip
        self.gone = threading.Event()
        self.request_id, self.is_cancelled = lambda: name, self.gone.is_set

    def end(self):
        """Return (tokens of each sample, finish reasons, error)."""
        tokens, outputs, error, last = [[], []], {}, None, False
        while not last:
            outputs, error, last = self.get(timeout=WAIT)
            if outputs:
                new = split(outputs["token_ids"], outputs["num_output_tokens"])
                tokens = [before + more for before, more in zip_longest(tokens, new, fillvalue=[])]
        return tokens, outputs.get("finish_reason"), error


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 5000), marks=pytest.mark.nightly)], ids=str)
def test_every_caller_gets_one_final_response(tiny, caplog, seeds, in_time):
    for seed in in_time(seeds):
        play(tiny[0], random.Random(seed))
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.WARNING] == []


def play(directory, rnd):
    with serving(directory, **OPTIONS) as calls:
        alone = {}
        for number, kind in enumerate(KINDS):
            calls.service.submit(one := Asked("", kind | {"timeout_ms": 60_000}, False))
            alone[number] = one.end()
        asked, stops = [], []
        for number in range(400):
            kind = rnd.randrange(len(KINDS))
            asked.append((kind, Asked(f"{number % 97}", KINDS[kind], rnd.random() < 0.8)))
            calls.service.submit(asked[-1][1])
            if rnd.random() < 0.02:
                for _, one in rnd.sample(asked, min(60, len(asked))):
                    one.gone.set()
            if rnd.random() < 0.02:
                stops.append(Asked(f"{rnd.randrange(97)}", {}, False))
                stops[-1].tensors = Caller(stop_request=True).tensors
                calls.service.submit(stops[-1])
        for _, one in asked:
            if rnd.random() < 0.4:
                one.gone.set()
        ends = Counter()
        for kind, one in asked:
            tokens, reasons, error = one.end()
            ends[error or reasons[0]] += 1
            assert error is None or error in ERRORS
            if not error and b"timeout" not in reasons:
                assert (tokens, reasons) == alone[kind][:2]
        assert {b"length", b"stop", b"timeout", *ERRORS} <= ends.keys(), ends
        assert sum(response["num_stopped"][0] for one in stops for response in one.all()) == ends[STOPPED]
        until(lambda: not calls.service._assembly.scheduler.has_work)
        calls.service._assembly.scheduler.check()
        assert calls.service._assembly.scheduler.blocks.num_used == 0
        assert (calls.service._engine.waiting, len(calls.service._responder._tenants)) == (0, 0)
    assert all(one.empty() for _, one in asked)
