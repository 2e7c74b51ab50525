"""Requests with several prompts."""

import threading

import openai
import pytest

from tests.support.gateway import PROMPT, WAIT, error_of, respond_with


def echo(inputs):
    """Return each prompt as output, one character per delta. The prompt `fail` fails."""
    text = inputs.get("text_input") or str(inputs["input_ids"])
    return {"say": [], "fail": "INVALID_ARGUMENT: text_input: no"} if text == "fail" else {"say": list(text)}


def test_too_many_prompts_are_rejected(front):
    status, body = front.ask("/v1/completions", PROMPT | {"prompt": ["a"] * 3})
    assert (status, len(body["choices"])) == (200, 3)
    for prompts in (["a"] * 4, [[1]] * 4):
        status, body = front.ask("/v1/completions", PROMPT | {"prompt": prompts})
        assert (status, error_of(status, body)["param"]) == (400, "prompt")
        assert body["error"]["message"] == "prompt: has 4 prompts; must be at most 3 (--max-prompts)"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["ab", "cd", "e"], ["ab", "cd", "e"]),
        (["ab"], ["ab"]),
        ([5, 6], ["[5, 6]"]),
        ([[5], [6, 7]], ["[5]", "[6, 7]"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_has_its_choice(front, fake, prompt, texts, stream):
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    with respond_with(fake, echo):
        asked = {"stream_options": {"include_usage": True}} if stream else {}
        answer = client.completions.create(model="paged_llm", prompt=prompt, stream=stream, **asked)
        chunks = list(answer) if stream else [answer]
    expected = dict.fromkeys(range(len(texts)), "")
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        expected[choice.index] += choice.text
    assert list(expected.values()) == texts
    assert chunks[-1].usage.prompt_tokens == 7 * len(texts)
    assert chunks[-1].usage.completion_tokens == sum(2 * len(text) for text in texts)


@pytest.mark.parametrize("stream", [False, True])
def test_rejected_prompt_is_named_and_cancels_the_others(front, fake, stream):
    held = threading.Event()

    def hold(inputs):
        if inputs["text_input"] == "fail":
            assert held.wait(WAIT)  # else the other could be cancelled before it arrives
            return echo(inputs)
        held.set()
        return {"say": [], "hold": True}

    fake.left.clear()
    with respond_with(fake, hold):
        status, body = front.ask("/v1/completions", PROMPT | {"prompt": ["a", "fail"], "stream": stream})
    assert (status, error_of(status, body)["param"]) == (400, "prompt.1")
    assert fake.left.wait(WAIT), "the other goes on"
