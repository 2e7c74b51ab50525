"""Requests, and the oracle: what each of them gets alone."""

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
ALWAYS = {  # asked by everyone, so that tokens, text and end can be held against the oracle's
    "return_token_ids": True,
    "return_num_output_tokens": True,
    "return_finish_reason": True,
    "return_text_offsets": True,
    "exclude_input_in_output": True,
}


@dataclass(frozen=True)
class Ask:
    """A request, and what it gets alone: of each sample."""

    text: str
    sampling: dict[str, Any]
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)


def catalogue(random: random.Random, count: int, *, prompt: tuple[int, int], output: tuple[int, int]) -> list[Ask]:
    """Requests of every kind whose tokens are known beforehand: greedy, drawn by a seed, several samples, beams, and
    such as end at a token or a string. prompt, output: in tokens, from and up to."""
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
        made.append(Ask("".join(random.choices(LETTERS, k=random.randint(*prompt))), sampling))
    return made


def record_expected(http_url: str, asks: Sequence[Ask]) -> list[Ask]:
    """The same with what the server answers, one after the other."""
    return [_answered(ask, _generate(http_url, ask)) for ask in asks]


def _generate(http_url: str, ask: Ask) -> dict[str, Any]:
    body = json.dumps({"text_input": ask.text} | ALWAYS | {"sampling_parameters": json.dumps(ask.sampling)}).encode()
    request = urllib.request.Request(f"http://{http_url}/v2/models/{MODEL}/generate", body)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{ask}: {error.read().decode()}") from None


def _answered(ask: Ask, answer: dict[str, Any]) -> Ask:
    counts, tokens = as_list(answer["num_output_tokens"]), as_list(answer["token_ids"])
    return replace(
        ask, tokens=split(tokens, counts), texts=as_list(answer["text_output"]), finish=as_list(answer["finish_reason"])
    )


def as_list(value: Any) -> list[Any]:
    """The generate endpoints write a tensor of one element without brackets."""
    return value if isinstance(value, list) else [value]


def split(tokens: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """One sample's tokens after the other's."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(tokens[start : start + count]))
        start += count
    return parts
