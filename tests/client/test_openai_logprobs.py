"""Log probabilities in OpenAI's shapes, of tokens that are hard to show."""

from client.openai import logprobs
from client.types import Completion, TokenLogprob


def entry(text, logprob, token_id=0):
    return TokenLogprob(token_id, logprob, rank=1, decoded_token=text)


def test_part_of_a_character_has_no_bytes():
    told = logprobs.chat_logprobs([(entry("\ufffd", -1.0), entry("é", -2.0))], 2)
    chosen, other = told["content"][0]["top_logprobs"]
    assert (chosen["bytes"], other["bytes"]) == (None, [0xC3, 0xA9])


def test_an_unlikely_choice_is_not_among_the_likeliest_of_a_chat():
    entries = (entry("c", -9.0), entry("a", -1.0), entry("b", -2.0))
    (told,) = logprobs.chat_logprobs([entries], 2)["content"]
    assert told["token"] == "c"
    assert [one["token"] for one in told["top_logprobs"]] == ["a", "b"]
    assert logprobs.completion_logprobs([entries], [0])["top_logprobs"] == [{"a": -1.0, "b": -2.0, "c": -9.0}]


def test_the_likeliest_of_tokens_with_one_text_stands_for_them():
    told = logprobs.completion_logprobs([(entry("a", -3.0, 1), entry("a", -1.0, 2))], [0])
    assert told["top_logprobs"] == [{"a": -1.0}]


def test_a_prompt_of_which_nothing_was_computed_has_its_tokens_and_no_numbers():
    """A deadline came first."""
    answer = Completion("The sea", "timeout", 3, 0, prompt_text_offsets=(0, 3, 5))
    told = logprobs.echo_logprobs(answer)
    assert told["tokens"] == ["The", " s", "ea"]
    assert told["token_logprobs"] == told["top_logprobs"] == [None] * 3
    assert told["text_offset"] == [0, 3, 5]


def test_a_special_token_at_the_beginning_has_its_own_text():
    """Which is no part of the prompt's."""
    known = (None, (entry("The", -1.0),), (entry("<end>", -2.0),))
    answer = Completion(
        "The", "length", 3, 0, prompt_text_offsets=(0, 0, 3), prompt_logprobs=known, first_prompt_token="<begin>"
    )
    told = logprobs.echo_logprobs(answer)
    assert told["tokens"] == ["<begin>", "The", "<end>"]
    assert told["text_offset"] == [0, 0, 3]


def test_of_a_prompt_that_was_computed_only_the_first_token_has_none():
    known = (None, (entry(" s", -1.0),), (entry("ea", -2.0),))
    answer = Completion("The sea", "length", 3, 0, prompt_text_offsets=(0, 3, 5), prompt_logprobs=known)
    told = logprobs.echo_logprobs(answer)
    assert told["tokens"] == ["The", " s", "ea"]
    assert told["token_logprobs"] == [None, -1.0, -2.0]
