"""An open request and its samples."""

import json
from dataclasses import replace

import pytest

from paged_backend.api.errors import RequestError
from paged_backend.api.request import FinishReason, TokenDelta, Usage
from paged_backend.server.prompts.sessions import SessionName, Sessions
from paged_backend.server.streams.stream import Sample, StreamBuilder
from paged_backend.text.detokenizer import Detokenizer
from paged_backend.text.stop_tokens import StopTokens
from tests.support.in_process import WAIT
from tests.support.prompts import LIMITS, arrival, encoded, encoder, ids
from tests.support.streams import TOKENIZER, Client, LogprobsClient, step, step_with_logprobs
from tests.support.wire_requests import flag, read, text

NAME = SessionName("", 7)


def test_responses_have_their_own_logprobs_and_the_cumulative_sum(opened):
    responder, _, _ = opened
    client = LogprobsClient(1)
    client.may_send.clear()
    responder.open(client.stream)
    responder.emit(step_with_logprobs(1, "a"))
    assert client.sending.wait(WAIT)
    for char in "bcd":
        responder.emit(step_with_logprobs(1, char))
    client.may_send.set()
    assert client.got.get(timeout=WAIT) == ("a", [-0.5], False)
    assert client.got.get(timeout=WAIT) == ("bcd", [-2.0], False)
    responder.emit(step_with_logprobs(1, "e", FinishReason.LENGTH))
    assert client.got.get(timeout=WAIT) == ("e", [-2.5], True)


class FailingClient(Client):
    """A client whose tokens cannot be decoded and whose sends fail; it begins its next turn during the first send."""

    def __init__(self, key, sessions):
        super().__init__(key, stop=["x"])
        self.sessions, self.next_turns = sessions, []
        sessions.begin(NAME, start=True, end=False).finish([1], {})
        self.stream.turn = sessions.begin(NAME, start=False, end=False)

    def decode(self, ids):
        raise ValueError("no text")

    def send(self, response, flags):
        if not self.next_turns:
            self.next_turns.append(self.sessions.begin(NAME, start=False, end=False))
        raise RuntimeError("no way back")


def test_a_session_is_released_once_when_sending_fails(opened):
    """Its next turn, which has begun by then, is not ended."""
    responder, _, aborted = opened
    sessions = Sessions(60, 1, print)
    broken, other = FailingClient(1, sessions), Client(2)
    for client in (broken, other):
        responder.open(client.stream)
    responder.emit(step(1, "a"))
    responder.emit(step(2, "b"))
    assert aborted.get(timeout=WAIT) == 1
    assert other.got.get(timeout=WAIT) == ("b", None, False)
    responder.emit(step(2, "c", FinishReason.LENGTH))
    assert other.got.get(timeout=WAIT) == ("c", None, True)
    assert len(broken.next_turns) == 1 and aborted.empty()
    with pytest.raises(RequestError, match="still running"):
        sessions.begin(NAME, start=False, end=False)


def test_a_response_has_an_element_for_each_sample_in_order():
    """That of a sample that has ended is empty."""
    client = Client(1)
    stream, texts = client.stream, []
    stream.samples.append(Sample(Detokenizer(client.decode, [120]), False))
    for sample, char, finish in ((1, "a", FinishReason.LENGTH), (0, "b", None), (0, "c", FinishReason.LENGTH)):
        stream.take(step(1, char, finish).deltas[0]._replace(sample=sample), 1.0)
        assert stream.has_new_text()
        texts.append(stream.take_outputs()["text_output"].tolist())
    assert texts == [[b"", b"a"], [b"b", b""], [b"c", b""]]


def test_a_receipt_excludes_preempted_time_from_every_phase():
    """2 of the 4 seconds between scheduling and the first token were preempted, and 3 of the 5 seconds after it."""
    stream = Client(1).stream
    stream.scheduled_at = 1.0
    for when, waited in ((5.0, 2.0), (10.0, 5.0)):
        usage = Usage(*[0] * 6, preempted_seconds=waited)
        stream.take(step(1, "a").deltas[0]._replace(usage=usage), when)
    phases = {name: value for name, value in stream.usage_receipt().items() if name.endswith("_seconds")}
    assert phases == {"queued_seconds": 1, "prefill_seconds": 2, "decode_seconds": 2, "preempted_seconds": 5}


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
    output = sample.take_output(offsets=False)
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
