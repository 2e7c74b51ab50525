"""One output: its tokens, text and logprobs, and what has been sent of them."""

import json

import pytest

from paged_backend.api.request import FinishReason, TokenDelta
from paged_backend.server.sample import Sample
from paged_backend.text.detokenizer import Detokenizer
from paged_backend.text.stop_tokens import StopTokens
from tests.support.in_process import WAIT
from tests.support.prompts import ids
from tests.support.streams import TOKENIZER, LogprobsClient, step_with_logprobs


def test_tokens_after_a_stop_string_have_no_logprobs(opened):
    """The tokens of the stop string itself count as output and have logprobs."""
    responder, _, _ = opened
    client = LogprobsClient(1, stop=["cd"])
    responder.open(client.stream)
    responder.emit(step_with_logprobs(1, "abcdef"))
    assert client.got.get(timeout=WAIT) == ("abcd", [-2.0], True)


def sample_of(stop_tokens=None, include_stop=False):
    return Sample(Detokenizer(TOKENIZER.decode, ids("x")), include_stop, stop_tokens or StopTokens())


def output_of(sample):
    output = sample.take_output(offsets=False, logprobs=False)
    return output.text, list(output.token_ids), output.finish_reason


def test_only_new_text_and_tokens_are_taken():
    sample = sample_of()
    sample.take(TokenDelta(1, tuple(ids("ab"))))
    sample.detokenize()
    assert output_of(sample) == ("ab", ids("ab"), None)
    sample.take(TokenDelta(1, tuple(ids("c")), FinishReason.LENGTH))
    assert output_of(sample) == ("c", ids("c"), "length")
    assert (sample.all_text, sample.num_tokens) == ("abc", 3)


@pytest.mark.parametrize(("include_stop", "text"), [(False, "a"), (True, "ab")])
def test_the_stop_token_is_counted_but_its_text_is_not_output(include_stop, text):
    (b,) = ids("b")
    sample = sample_of(StopTokens(frozenset({b})), include_stop)
    sample.take(TokenDelta(1, tuple(ids("ab")), FinishReason.STOP))
    assert output_of(sample) == (text, ids("ab"), "stop")
    assert sample.stop_reason == str(b)


def test_a_stop_word_ends_the_sample_within_a_step():
    sample = sample_of(StopTokens(words={ids("c")[0]: [ids("bc")]}))
    sample.take(TokenDelta(1, tuple(ids("ab"))))
    sample.take(TokenDelta(1, tuple(ids("cde"))))
    assert output_of(sample) == ("abc", ids("abc"), "stop")
    assert json.loads(sample.stop_reason) == ids("bc")


def test_a_token_of_a_partial_character_is_held_back_until_the_end():
    sample = sample_of()
    first, second = ids("é")
    sample.take(TokenDelta(1, (first,)))
    sample.detokenize()
    assert sample.text == ""
    sample.take(TokenDelta(1, (second,), FinishReason.LENGTH))
    assert sample.text == "é"
