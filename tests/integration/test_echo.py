"""The `echo` parameter: the prompt text before the output, and the text offsets of its tokens."""

import json

import pytest

from tests.support.callers import serving
from tests.support.in_process import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXT = "The sea, é"
IDS = TOKENIZER.encode(TEXT)
OUTPUTS = {"return_token_ids": True, "return_text_offsets": True, "return_num_output_tokens": True}
PROMPTS = [{"text_input": TEXT}, {"input_ids": IDS}]


@pytest.fixture(scope="module")
def service(tiny):
    with serving(tiny[0]) as running:
        yield running


def sampling(**values):
    return json.dumps({"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 1} | values)


def char_offsets(text):
    """Return the character index of each byte."""
    return [index for index, char in enumerate(text) for _ in char.encode()]


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: next(iter(prompt)))
def test_every_sample_starts_with_the_prompt(service, prompt, n, exclude):
    inputs = {**prompt, **OUTPUTS, "exclude_input_in_output": True}
    without = service.ask(**inputs, sampling_parameters=sampling(n=n))
    outputs = service.ask(**inputs | {"exclude_input_in_output": exclude}, sampling_parameters=sampling(n=n, echo=True))
    assert outputs["text_output"] == [TEXT.encode() + text for text in without["text_output"]]
    assert outputs["text_offsets"] == [len(TEXT) + offset for offset in without["text_offsets"]]
    assert outputs["token_ids"] == without["token_ids"]
    assert outputs["prompt_text_offsets"] == char_offsets(TEXT)
    assert outputs["first_prompt_token"] == [TEXT[0].encode()]
    assert not {"prompt_text_offsets", "first_prompt_token"} & without.keys()


@pytest.mark.parametrize("n", [1, 2])
def test_echoed_stream_adds_up_to_the_whole_output(service, n):
    inputs = {"text_input": TEXT, **OUTPUTS, "sampling_parameters": sampling(n=n, echo=True, prompt_logprobs=1)}
    whole = service.ask(**inputs)
    pieces = service.call(**inputs, stream=True).all()
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
    parameters = sampling(max_tokens=0, echo=True, n=2, **scores)
    inputs = {"return_finish_reason": True, "return_num_input_tokens": True, **OUTPUTS}
    (answer,) = service.call(text_input=TEXT, stream=stream, sampling_parameters=parameters, **inputs).all()
    assert answer["text_output"] == [TEXT.encode()] * 2
    assert answer["finish_reason"] == [b"length"] * 2
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == ([len(IDS)], [0, 0])
    assert (answer["token_ids"], answer["text_offsets"], answer["prompt_token_ids"]) == ([], [], IDS)
    if scores:
        assert len(json.loads(answer["prompt_logprobs"][0])) == len(IDS)


def test_stop_string_is_not_matched_in_the_echoed_prompt(service):
    parameters = sampling(echo=True, stop="sea", max_tokens=3)
    answer = service.ask(text_input=TEXT, return_num_output_tokens=True, sampling_parameters=parameters)
    assert answer["num_output_tokens"] == [3]
    assert answer["text_output"][0].startswith(TEXT.encode())


def test_unsupported_echo_is_rejected(service):
    messages = '[{"role": "user", "content": "x"}]'
    error = service.call(messages=messages, sampling_parameters='{"echo": true}').rejection()
    assert "echo=true: has no effect with messages; leave it out" in error
    error = service.call(text_input=TEXT, sampling_parameters='{"max_tokens": 0, "echo": false}').rejection()
    assert "max_tokens=0: must be 1..256, or 0 with prompt_logprobs, echo or prefill_only" in error
