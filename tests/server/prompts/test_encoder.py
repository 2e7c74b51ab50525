"""Token ids of prompts, and of the words that bias or forbid tokens."""

from dataclasses import replace

import numpy as np
import pytest

from paged_backend.api.errors import RequestError
from paged_backend.api.limits import UNBOUNDED_MAX_TOKENS, InputLimits
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.thinking import ThinkingBudget
from tests.support.in_process import byte_tokenizer
from tests.support.prompts import LIMITS, arrival, encoder, ids, tokens_of
from tests.support.wire_requests import read, text


def test_a_bad_word_is_forbidden_with_and_without_a_space_before_it():
    sampling = SamplingParams(bad_words=("ab", " ab", "é"), bad_words_token_ids=((7,),))
    found = encoder().encode_bad_words(sampling)
    assert found == (tuple(ids("ab")), tuple(ids(" ab")), tuple(ids("é")), tuple(ids(" é")), (7,))


def test_a_bad_word_outside_the_vocabulary_is_left_out():
    low, high = sorted("ab", key=ids)
    limits = replace(LIMITS, vocab_size=ids(high)[0])
    forbidden = encoder(limits).encode_bad_words(SamplingParams(bad_words=(low, high)))
    assert tuple(ids(low)) in forbidden and tuple(ids(high)) not in forbidden


def test_the_bias_of_a_word_is_added_to_that_of_its_tokens():
    (a,), (b,) = ids("a"), ids("b")
    sampling = SamplingParams(logit_bias=((a, 1.0),), word_bias=(("ab", 2.5), ("b", -0.5)))
    assert dict(encoder().expand_word_bias(sampling).logit_bias) == {a: 3.5, b: 2.0}


def test_the_biases_of_words_count_for_the_limit():
    limits = replace(LIMITS, input_limits=InputLimits(max_logit_biases=2))
    assert encoder(limits).expand_word_bias(SamplingParams(word_bias=(("ab", 1.0),)))
    with pytest.raises(RequestError, match=r"word_bias=.3 tokens with those of logit_bias.: must be at most 2"):
        encoder(limits).expand_word_bias(SamplingParams(word_bias=(("abc", 1.0),)))


@pytest.mark.parametrize(
    "template", ["{% if x %}</think>{% endif %}", {"default": "", "tool_use": "<think>\n</think>"}]
)
def test_marks_of_reasoning_come_from_the_chat_template(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    made = encoder(tokenizer=tokenizer)
    expected = ThinkingBudget(5, tuple(ids("<think>")), tuple(ids("</think>")))
    assert made.thinking_budget(SamplingParams(thinking_token_budget=5)) == expected
    assert made.thinking_budget(SamplingParams()) is None


@pytest.mark.parametrize(
    ("template", "vocab_size"), [(None, 320), ("{{ messages }}", 320), ("</think>", max(ids("</think>")))]
)
def test_a_thinking_budget_needs_marks_of_reasoning(template, vocab_size):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    made = encoder(replace(LIMITS, vocab_size=vocab_size), tokenizer=tokenizer)
    with pytest.raises(RequestError, match=r"thinking_token_budget=0: must be null: the chat template has no"):
        made.thinking_budget(SamplingParams(thinking_token_budget=0))
    assert made.thinking_budget(SamplingParams()) is None


def test_token_ids_are_truncated_before_they_are_checked():
    given = arrival(read(input_ids=np.array([999, 5, 6], np.int32)), truncate_prompt_tokens=2)
    assert tokens_of(encoder(), given) == [5, 6]
    with pytest.raises(RequestError, match=r"input_ids\[0\]=999: must be 0\.\.319"):
        tokens_of(encoder(), arrival(given.call))


def test_a_truncated_text_keeps_its_last_tokens():
    assert tokens_of(encoder(), arrival(read(text_input=text("abcd")), truncate_prompt_tokens=3)) == ids("bcd")


@pytest.mark.parametrize(
    ("max_tokens", "room"),
    [(0, 0), (5, 5), (UNBOUNDED_MAX_TOKENS, 1), (LIMITS.max_model_len + 5, LIMITS.max_model_len - 1)],
)
def test_truncation_to_the_context_length_leaves_room_for_the_output(max_tokens, room):
    kept = LIMITS.max_model_len - room
    prompt = np.arange(300, dtype=np.int32)
    sampling = {"truncate_prompt_tokens": LIMITS.max_model_len, "max_tokens": max_tokens}
    assert tokens_of(encoder(), arrival(read(input_ids=prompt), **sampling)) == prompt[-kept:].tolist()


def test_a_text_longer_than_any_prompt_is_rejected_before_it_is_tokenized():
    longest = LIMITS.max_model_len * len("<|end|>")  # the longest token
    encoder().check_length("text_input", "x" * longest)
    with pytest.raises(RequestError, match=rf"text_input: {longest + 1} characters; must be at most {longest} "):
        encoder().check_length("text_input", "x" * (longest + 1))
    with pytest.raises(RequestError, match="messages: 4 characters; must be at most 3 "):
        encoder(max_chars=3).check_length("messages", "xxxx")
