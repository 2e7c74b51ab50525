"""The process that encodes long prompts."""

import json
import os
import signal
import threading
from dataclasses import replace

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.server.prompts import encoder_process
from paged_backend.server.prompts.encoder import Earlier, Prompt, PromptEncoder
from paged_backend.server.prompts.encoder_process import PromptProcess
from paged_backend.server.wire.call import read_call
from tests.support.in_process import WAIT, byte_tokenizer
from tests.support.prompts import LIMITS
from tests.support.wire_requests import text

TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}"
SAID = Earlier(messages=(b'[{"role": "user", "content": "ab"}]',), num_chars=35)
NOTHING = Earlier()


def made(limits):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return PromptEncoder(tokenizer, limits, max_chars=None, template_timeout=WAIT)


@pytest.fixture(scope="module")
def encoder():
    return made(LIMITS)


@pytest.fixture(scope="module")
def process(encoder):
    made = PromptProcess(encoder, WAIT)
    yield made
    made.stop()


def prompt(earlier=NOTHING, sequence_id=0, **inputs):
    inputs = {name: text(value if isinstance(value, str) else json.dumps(value)) for name, value in inputs.items()}
    return Prompt(read_call(inputs, {}, sequence_id=sequence_id), SamplingParams(), earlier)


def turns(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "given",
    [
        prompt(text_input="abc"),
        prompt(Earlier(tokens=[5, 6]), text_input="abc"),
        prompt(messages=turns("a<|end|>b")),
        prompt(SAID, sequence_id=7, messages=turns("c")),
    ],
    ids=["text", "text of a session", "messages", "messages of a session"],
)
def test_prompts_are_encoded_as_in_the_engine_process(encoder, process, given):
    encoded = process.encode(given)
    assert encoded == encoder.encode(given)
    assert (encoded.messages is None) == (given.call.sequence is None or not given.call.is_chat)


@pytest.mark.parametrize(
    "given",
    [
        prompt(text_input="a" * 100),
        prompt(messages=turns(5)),
        prompt(messages="[{"),
        prompt(embedding_request={"input": "abc"}),
    ],
    ids=["too long", "no conversation", "no JSON", "no embeddings"],
)
def test_errors_are_those_of_the_engine_process(encoder, process, given):
    with pytest.raises(RequestError) as expected:
        encoder.encode(given)
    with pytest.raises(RequestError) as caught:
        process.encode(given)
    assert (str(caught.value), caught.value.__dict__) == (str(expected.value), expected.value.__dict__)


def test_a_prompt_that_takes_too_long_is_rejected():
    """Its process ends, and the next prompt gets a new one."""
    process = PromptProcess(made(replace(LIMITS, max_model_len=10_000_000)), 0.5)
    with pytest.raises(RequestError) as caught:
        process.encode(prompt(text_input="a" * 30_000_000))
    expected = "INVALID_ARGUMENT: text_input: tokenizing it takes more than 0.5 s (tokenize_timeout)"
    assert str(caught.value) == expected
    assert process.encode(prompt(text_input="abc")).tokens
    process.stop()


@pytest.fixture
def started(monkeypatch):
    """The processes that were started."""
    found, start = [], encoder_process.start_module
    monkeypatch.setattr(
        encoder_process, "start_module", lambda *args, **more: found.append(start(*args, **more)) or found[-1]
    )
    return found


def test_a_process_that_was_killed_is_started_again(encoder, started):
    """One that was killed between two prompts fails none of them."""
    process = PromptProcess(encoder, WAIT)
    for _ in range(2):
        assert process.encode(prompt(text_input="abc")).tokens
        started[-1].kill()
        started[-1].wait(WAIT)
    assert len(started) == 2


def test_a_process_that_is_killed_fails_its_prompt(encoder, started):
    process, errors = PromptProcess(encoder, WAIT), []
    assert process.encode(prompt(text_input="abc")).tokens
    os.kill(started[0].pid, signal.SIGSTOP)

    def encode():
        with pytest.raises(RequestError) as caught:
            process.encode(prompt(text_input="abc"))
        errors.append(caught.value)

    thread = threading.Thread(target=encode)
    thread.start()
    os.kill(started[0].pid, signal.SIGKILL)
    thread.join(WAIT)
    (error,) = errors
    assert error.code is ErrorCode.INTERNAL
    assert "the process that encodes long prompts has ended (signal 9); retry" in str(error)
    assert process.encode(prompt(text_input="abc")).tokens
    process.stop()
    assert started[-1].wait(WAIT) == -signal.SIGKILL
