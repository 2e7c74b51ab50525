"""Engine requests made of OpenAI's."""

import json

import pytest

from tests.support.gateway import BODIES, CHAT, PROMPT


@pytest.mark.parametrize("path", BODIES)
def test_sampling_fields_are_passed_to_the_engine(front, fake, path):
    fields = {
        "max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.25, "seed": 7,
        "stop": ["a", "b"], "stop_token_ids": [1], "stop_words_token_ids": [[1, 2]],
        "bad_words_token_ids": [[3]], "logit_bias": {"7": -1.5}, "bad_words": ["c"],
        "allowed_token_ids": [1, 7], "ignore_eos": True, "repetition_penalty": 1.5,
        "presence_penalty": 1, "frequency_penalty": -1.0, "skip_special_tokens": False,
        "include_stop_str_in_output": True, "n": 1, "best_of": 2, "beam_width": 2, "length_penalty": 2.0,
        "early_stopping": "never", "priority": 3, "cache_salt": "s", "timeout_ms": 9, "prompt_logprobs": 2,
        "add_special_tokens": True, "truncate_prompt_tokens": 5, "word_bias": {"d": 1.0},
    }  # fmt: skip
    assert front.ask(path, BODIES[path] | fields)[0] == 200
    assert fake.sampling[-1] == fields


def test_null_is_the_default(front, fake):
    fields = {"temperature": None, "stop": None, "stream": None, "stream_options": None, "logprobs": None}
    assert front.ask("/v1/completions", PROMPT | fields)[0] == 200
    assert fake.sampling[-1] == {}


def test_chat_without_max_tokens_is_unlimited(front, fake):
    assert front.ask("/v1/chat/completions", CHAT)[0] == 200
    assert fake.sampling[-1] == {"max_tokens": None}
    assert front.ask("/v1/chat/completions", CHAT | {"max_completion_tokens": 9})[0] == 200
    assert fake.sampling[-1] == {"max_tokens": 9}


def test_max_completion_tokens_has_precedence(front, fake):
    assert front.ask("/v1/chat/completions", CHAT | {"max_tokens": 5, "max_completion_tokens": 9})[0] == 200
    assert fake.sampling[-1] == {"max_tokens": 9}


def test_messages_are_rendered_by_the_server(front, fake):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert front.ask("/v1/chat/completions", CHAT | {"messages": messages})[0] == 200
    sent = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ab"}]
    assert json.loads(fake.requests[-1]["messages"]) == sent


@pytest.mark.parametrize("path", BODIES)
def test_ignored_fields_are_not_passed_on(front, fake, path):
    front.ask(path, BODIES[path])
    fields = {
        "user": "me", "safety_identifier": "x", "prompt_cache_key": "y", "store": False,
        "response_format": {"type": "text"},
    }  # fmt: skip
    assert front.ask(path, BODIES[path] | fields)[0] == 200
    assert fake.sampling[-1] == fake.sampling[-2]
