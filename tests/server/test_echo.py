"""The prompt before the output: its text, and where its tokens are in it."""

import json

import pytest

from tests.support.callers import serving
from tests.support.in_process import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXT = "The sea, é"
IDS = TOKENIZER.encode(TEXT)
ASKED = {"return_token_ids": True, "return_text_offsets": True, "return_num_output_tokens": True}
PROMPTS = [{"text_input": TEXT}, {"input_ids": IDS}]


@pytest.fixture(scope="module")
def service(tiny):
    with serving(tiny[0]) as running:
        yield running


def sampling(**values):
    return json.dumps({"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 1} | values)


def own(text):
    """Of each byte the character that it is a part of."""
    return [index for index, char in enumerate(text) for _ in char.encode()]


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: next(iter(prompt)))
def test_every_sample_starts_with_the_prompt(service, prompt, n, exclude):
    asked = {**prompt, **ASKED, "exclude_input_in_output": True}
    without = service.ask(**asked, sampling_parameters=sampling(n=n))
    outputs = service.ask(**asked | {"exclude_input_in_output": exclude}, sampling_parameters=sampling(n=n, echo=True))
    assert outputs["text_output"] == [TEXT.encode() + text for text in without["text_output"]]
    assert outputs["text_offsets"] == [len(TEXT) + offset for offset in without["text_offsets"]]
    assert outputs["token_ids"] == without["token_ids"]
    assert outputs["prompt_text_offsets"] == own(TEXT)
    assert outputs["first_prompt_token"] == [TEXT[0].encode()]
    assert not {"prompt_text_offsets", "first_prompt_token"} & without.keys()


@pytest.mark.parametrize("n", [1, 2])
def test_echoed_stream_adds_up_to_the_whole_output(service, n):
    asked = {"text_input": TEXT, **ASKED, "sampling_parameters": sampling(n=n, echo=True, prompt_logprobs=1)}
    whole = service.ask(**asked)
    pieces = service.call(**asked, stream=True).all()
    assert len(pieces) > 1
    assert all(text.startswith(TEXT.encode()) for text in pieces[0]["text_output"])
    for index in range(n):
        assert b"".join(piece["text_output"][index] for piece in pieces) == whole["text_output"][index]
    for name in ("prompt_text_offsets", "first_prompt_token", "prompt_logprobs", "prompt_token_ids"):
        assert pieces[0][name] == whole[name]
        assert not any(name in piece for piece in pieces[1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("scores", [{}, {"prompt_logprobs": 1}])
def test_echo_with_max_tokens_zero(service, stream, scores):
    wanted = sampling(max_tokens=0, echo=True, n=2, **scores)
    asked = {"return_finish_reason": True, "return_num_input_tokens": True, **ASKED}
    (answer,) = service.call(text_input=TEXT, stream=stream, sampling_parameters=wanted, **asked).all()
    assert answer["text_output"] == [TEXT.encode()] * 2
    assert answer["finish_reason"] == [b"length"] * 2
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == ([len(IDS)], [0, 0])
    assert (answer["token_ids"], answer["text_offsets"], answer["prompt_token_ids"]) == ([], [], IDS)
    if scores:
        assert len(json.loads(answer["prompt_logprobs"][0])) == len(IDS)


def test_stop_string_is_not_matched_in_the_echoed_prompt(service):
    wanted = sampling(echo=True, stop="sea", max_tokens=3)
    answer = service.ask(text_input=TEXT, return_num_output_tokens=True, sampling_parameters=wanted)
    assert answer["num_output_tokens"] == [3]
    assert answer["text_output"][0].startswith(TEXT.encode())


def test_unsupported_echo_is_rejected(service):
    messages = '[{"role": "user", "content": "x"}]'
    refused = service.call(messages=messages, sampling_parameters='{"echo": true}').refusal()
    assert "echo=true: has no effect with messages; leave it out" in refused
    refused = service.call(text_input=TEXT, sampling_parameters='{"max_tokens": 0, "echo": false}').refusal()
    assert "max_tokens=0: must be 1..256, or 0 with prompt_logprobs or echo" in refused
