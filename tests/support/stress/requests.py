"""Requests, and their expected output: what the server returns for each of them without load."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MODEL = "paged_llm"
LETTERS = "".join(map(chr, range(ord("!"), ord("~") + 1)))  # the vocabulary: token 0 is "!", and so on
RETURN_FLAGS = {  # in every request, so that tokens, text and finish reason can be compared
    "return_token_ids": True,
    "return_num_output_tokens": True,
    "return_finish_reason": True,
    "return_text_offsets": True,
    "exclude_input_in_output": True,
}


@dataclass(frozen=True)
class StressRequest:
    """A request, and the expected output of each sample."""

    text: str
    sampling: dict[str, Any]
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)


def make_requests(
    random: random.Random, count: int, *, prompt: tuple[int, int], output: tuple[int, int]
) -> list[StressRequest]:
    """Return deterministic requests of every kind: greedy, seeded, several samples, beams, stop tokens and strings.

    Args:
        prompt, output: minimum and maximum length in tokens.
    """
    kinds: Sequence[dict[str, Any]] = (
        {"temperature": 0},
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1, "n": 2},
        {"temperature": 0, "beam_width": 2, "n": 2},
        {"temperature": 1, "stop_token_ids": [7, 30, 60]},
        {"temperature": 1, "stop": ["a", "Q"]},
    )
    made = []
    for index in range(count):
        sampling = kinds[index % len(kinds)] | {"max_tokens": random.randint(*output)}
        sampling |= {"seed": index} if sampling["temperature"] else {}
        made.append(StressRequest("".join(random.choices(LETTERS, k=random.randint(*prompt))), sampling))
    return made


def record_expected(http_url: str, requests: Sequence[StressRequest]) -> list[StressRequest]:
    """Send the requests one after the other, and return them with the server's output as the expected one."""
    return [_with_output(request, _generate(http_url, request)) for request in requests]


def _generate(http_url: str, request: StressRequest) -> dict[str, Any]:
    inputs = {"text_input": request.text, "sampling_parameters": json.dumps(request.sampling)} | RETURN_FLAGS
    body = json.dumps(inputs).encode()
    http_request = urllib.request.Request(f"http://{http_url}/v2/models/{MODEL}/generate", body)
    try:
        with urllib.request.urlopen(http_request, timeout=120) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{request}: {error.read().decode()}") from None


def _with_output(request: StressRequest, answer: dict[str, Any]) -> StressRequest:
    counts, tokens = as_list(answer["num_output_tokens"]), as_list(answer["token_ids"])
    return replace(
        request,
        tokens=split(tokens, counts),
        texts=as_list(answer["text_output"]),
        finish=as_list(answer["finish_reason"]),
    )


def as_list(value: Any) -> list[Any]:
    """Return a list: the generate endpoints write a tensor of one element without brackets."""
    return value if isinstance(value, list) else [value]


def split(tokens: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Split the concatenated tokens of all samples."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(tokens[start : start + count]))
        start += count
    return parts
