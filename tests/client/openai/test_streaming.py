"""Streamed responses: usage, and errors after the first chunk."""

import openai
import pytest

from tests.support.gateway import BODIES, PROMPT, error_of


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [False, False]),
        ({"continuous_usage_stats": False}, [False, False]),
        ({"include_usage": True, "continuous_usage_stats": False}, [None, None, (7, 4, 11)]),
        ({"include_usage": True, "continuous_usage_stats": True}, [(7, 2, 9), (7, 4, 11), (7, 4, 11)]),
    ],
)
def test_usage_in_the_last_or_every_chunk(front, path, options, expected):
    """`False` in `expected` means that a chunk has no usage."""
    chunks = front.events(path, BODIES[path] | {"stream": True, "stream_options": options})
    assert [(usage := chunk.get("usage", False)) and tuple(usage.values()) for chunk in chunks] == expected


def test_continuous_usage_is_counted_per_choice(front):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = PROMPT | {"prompt": ["a", "b"], "stream": True, "stream_options": options}
    *chunks, last = front.events("/v1/completions", asked)
    for index in range(2):
        own = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [tuple(usage.values()) for usage in own] == [(7, 2, 9), (7, 4, 11)]
    assert tuple(last["usage"].values()) == (14, 8, 22)


@pytest.mark.parametrize(
    ("end", "message"),
    [({"fail": "INTERNAL: out of luck"}, "out of luck"), ({"cut": True}, "the stream ended before the output was")],
)
def test_error_after_the_first_chunk_is_an_event(front, says, end, message):
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    with says(say=["a"], **end), client.completions.create(**PROMPT, stream=True) as stream:
        assert next(stream).choices[0].text == "a"
        with pytest.raises(openai.APIError) as raised:
            next(stream)
    assert error_of(500, {"error": raised.value.body})["message"].startswith(message)
