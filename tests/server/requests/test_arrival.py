"""Streams and engine requests built from a call and the token ids of its prompt."""

from dataclasses import replace

import pytest

from paged_backend.server.requests.arrival import StreamBuilder
from tests.support.prompts import LIMITS, arrival, encoded, encoder, ids
from tests.support.streams import TOKENIZER
from tests.support.wire_requests import flag, read, text


def builder(seed=None):
    return StreamBuilder(TOKENIZER, frozenset({256}), LIMITS, encoder(), seed=seed, max_seconds=60.0)


def test_requests_without_a_seed_get_seeds_of_their_own():
    def seeds(made):
        return [made.build(arrival(read(text_input=text("a"))), encoded("a")).request.seed for _ in range(3)]

    assert len(set(seeds(builder(seed=5)))) == 3
    assert seeds(builder(seed=5)) == seeds(builder(seed=5)) != seeds(builder(seed=6))
    assert builder().build(arrival(read(text_input=text("a")), seed=7), encoded("a")).request.seed == 7


@pytest.mark.parametrize(
    ("returned", "sampling", "needed"),
    [
        ({}, {"logprobs": 3}, None),
        ({"return_logprobs": flag(True)}, {}, None),
        ({"return_logprobs": flag(True)}, {"logprobs": 3}, 3),
        ({"return_cumulative_logprob": flag(True)}, {"logprobs": 3}, 0),
        ({}, {"n": 1, "best_of": 2}, 0),
    ],
)
def test_only_logprobs_that_are_sent_or_compared_are_computed(returned, sampling, needed):
    call = read(text_input=text("a"), **returned)
    assert builder().build(arrival(call, **sampling), encoded("a")).request.token_outputs.get("logprobs") == needed


def test_the_echoed_prompt_is_the_text_before_the_output():
    call = read(text_input=text("aéb"), return_text_offsets=flag(True))
    stream = builder().build(arrival(call), encoded("aéb"))
    assert (stream.samples[0].text, stream.prompt_offsets) == ("aéb", [0, 1, 1, 2])
    truncated = builder().build(arrival(call, truncate_prompt_tokens=1), encoded("b"))
    assert (truncated.samples[0].text, truncated.prompt_offsets) == ("b", [0])
    silent = builder().build(arrival(replace(call, echo=False)), encoded("aéb"))
    assert (silent.samples[0].text, silent.prompt_offsets) == ("", None)


def test_a_stream_without_its_prompt_gets_it_later():
    made, given = builder(), arrival(read(text_input=text("ab")), n=2)
    opened = made.build_untokenized(given)
    assert not opened.is_tokenized
    opened.set_prompt(made.build(given, encoded("ab")))
    assert opened.is_tokenized and opened.request.prompt_token_ids == tuple(ids("ab"))
    assert [sample.text for sample in opened.samples] == ["ab", "ab"]
