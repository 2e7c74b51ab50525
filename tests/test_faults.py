"""Faults on purpose: each comes once, where it was asked for, and a name or a number that means nothing is refused."""

import json

import pytest

from paged_backend import faults
from paged_backend.config import ConfigError
from tests.callers import serving

ASKED = {"text_input": "one two", "return_token_ids": True, "return_finish_reason": True,
         "sampling_parameters": '{"max_tokens": 6, "temperature": 0, "ignore_eos": true}'}  # fmt: skip


@pytest.fixture
def faulty(tiny, monkeypatch):
    """A service with faults."""

    def make(**asked):
        monkeypatch.setenv(faults.VARIABLE, json.dumps(asked))
        return serving(tiny[0])

    return make


def tokens(responses):
    return [token for response in responses for token in response["token_ids"]]


def test_a_block_that_leaks_stays_in_use(faulty):
    with faulty(leak_block=2) as calls:
        scheduler = calls.service._assembly.scheduler
        used = []
        for _ in range(3):
            calls.ask(**ASKED)
            used.append(scheduler.blocks.num_used)
    assert used == [0, 1, 1]


def test_one_token_is_another(tiny, faulty):
    with serving(tiny[0]) as calls:
        right = tokens([calls.ask(**ASKED)])
    with faulty(wrong_token=8) as calls:
        first, second = (tokens([calls.ask(**ASKED)]) for _ in range(2))
    assert first == right
    assert second == [*right[:1], right[1] ^ 1, *right[2:]]


def test_a_last_response_is_kept_back_or_comes_twice(faulty):
    with faulty(double_final=2, drop_final=3) as calls:
        (expected,) = calls.call(**ASKED).all()
        assert calls.call(**ASKED).all() == [expected] * 2
        silent = calls.call(**ASKED)
        calls.ask(**ASKED)  # once it is answered, the one before is over as well
        assert silent.empty()


def test_without_faults_nothing_is_wrapped(tiny):
    with serving(tiny[0]) as calls:
        assembly = calls.service._assembly
        for thing in (calls.service, assembly.scheduler, assembly.scheduler.blocks, assembly.runner):
            assert not [name for name in vars(thing) if hasattr(type(thing), name)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"drop": 1}', "drop: unknown fault; known are leak_block"),
        ('{"drop_final": 0}', "drop_final=0: must be a whole number of at least 1"),
        ('{"drop_final": true}', "drop_final=true: must be"),
    ],
)
def test_what_is_no_fault_is_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        faults.read({faults.VARIABLE: text})
