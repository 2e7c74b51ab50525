"""Tests of log probabilities in the formats of OpenAI's API."""

from paged_client.openai import logprobs
from paged_client.types import Completion, TokenLogprob


def entry(text, logprob, token_id=0):
    return TokenLogprob(token_id, logprob, rank=1, decoded_token=text)


def test_partial_character_has_no_bytes():
    result = logprobs.chat_logprobs([(entry("\ufffd", -1.0), entry("é", -2.0))], 2)
    chosen, other = result["content"][0]["top_logprobs"]
    assert (chosen["bytes"], other["bytes"]) == (None, [0xC3, 0xA9])


def test_chat_top_logprobs_may_not_include_the_chosen_token():
    entries = (entry("c", -9.0), entry("a", -1.0), entry("b", -2.0))
    (result,) = logprobs.chat_logprobs([entries], 2)["content"]
    assert result["token"] == "c"
    assert [one["token"] for one in result["top_logprobs"]] == ["a", "b"]
    assert logprobs.completion_logprobs([entries], [0])["top_logprobs"] == [{"a": -1.0, "b": -2.0, "c": -9.0}]


def test_tokens_with_the_same_text_keep_the_most_likely():
    result = logprobs.completion_logprobs([(entry("a", -3.0, 1), entry("a", -1.0, 2))], [0])
    assert result["top_logprobs"] == [{"a": -1.0}]


def test_echo_without_prefill_has_no_logprobs():
    """The deadline passed before the prefill."""
    answer = Completion("The sea", "timeout", 3, 0, prompt_text_offsets=(0, 3, 5))
    result = logprobs.echo_logprobs(answer, 1, by_id=False)
    assert result["tokens"] == ["The", " s", "ea"]
    assert result["token_logprobs"] == result["top_logprobs"] == [None] * 3
    assert result["text_offset"] == [0, 3, 5]


def test_echo_includes_the_text_of_a_special_first_token():
    """The text of a special token is not part of the prompt's text."""
    known = (None, (entry("The", -1.0),), (entry("<end>", -2.0),))
    answer = Completion(
        "The", "length", 3, 0, prompt_text_offsets=(0, 0, 3), prompt_logprobs=known, first_prompt_token="<begin>"
    )
    result = logprobs.echo_logprobs(answer, 1, by_id=False)
    assert result["tokens"] == ["<begin>", "The", "<end>"]
    assert result["text_offset"] == [0, 0, 3]


def test_only_the_first_prompt_token_has_no_logprob():
    known = (None, (entry(" s", -1.0),), (entry("ea", -2.0),))
    answer = Completion("The sea", "length", 3, 0, prompt_text_offsets=(0, 3, 5), prompt_logprobs=known)
    result = logprobs.echo_logprobs(answer, 1, by_id=False)
    assert result["tokens"] == ["The", " s", "ea"]
    assert result["token_logprobs"] == [None, -1.0, -2.0]
