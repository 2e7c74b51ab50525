"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from client.types import Completion, Logprobs, TokenLogprob

HALF = "\ufffd"  # in the text of a token that holds some bytes of a character


def completion_logprobs(tokens: Sequence[Logprobs], offsets: Sequence[int]) -> dict[str, Any]:
    """As /v1/completions has them. The chosen token is among the likeliest in any case.

    Args:
        offsets: the character at which each token begins.
    """
    return {
        "tokens": [chosen.decoded_token for chosen, *_ in tokens],
        "token_logprobs": [chosen.logprob for chosen, *_ in tokens],
        "top_logprobs": [_by_text(entries) for entries in tokens],
        "text_offset": list(offsets),
    }


def echo_logprobs(first: Completion) -> dict[str, Any]:
    """Likewise, of the prompt before an output. Its first token has none, and none of them has where the request ended
    before its prompt was computed. first: the sample that tells of it."""
    offsets, told = first.prompt_text_offsets or (), first.prompt_logprobs or ()
    ends = [*offsets[1:], (first.text_offsets or (len(first.text),))[0]]
    rest = completion_logprobs([entries for entries in told if entries], offsets[1:])
    missing = [None] * (len(offsets) - len(rest["tokens"]))
    tokens = [first.text[slice(*both)] for both in zip(offsets, ends, strict=False)][: len(missing)]
    if first.first_prompt_token is not None:
        tokens[:1] = [first.first_prompt_token]
    return {
        "tokens": tokens + rest["tokens"],
        "token_logprobs": missing + rest["token_logprobs"],
        "top_logprobs": missing + rest["top_logprobs"],
        "text_offset": list(offsets),
    }


def chat_logprobs(tokens: Sequence[Logprobs], count: int) -> dict[str, Any]:
    """As /v1/chat/completions has them: `count` of the likeliest, among which the chosen one need not be."""
    return {
        "content": [
            {**_entry(entries[0]), "top_logprobs": [_entry(one) for one in _likeliest(entries)[:count]]}
            for entries in tokens
        ],
        "refusal": None,
    }


def prompt_logprobs_by_id(entries: Logprobs | None) -> dict[str, dict[str, Any]] | None:
    """As vLLM tells them of a prompt's tokens, of which the first has none."""
    if entries is None:
        return None
    return {
        str(one.token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for one in entries
    }


def _by_text(entries: Logprobs) -> dict[str, float]:
    """Of tokens that have the same text the likeliest stands for all."""
    return {one.decoded_token: one.logprob for one in reversed(_likeliest(entries))}


def _likeliest(entries: Logprobs) -> list[TokenLogprob]:
    return sorted(entries, key=lambda one: -one.logprob)


def _entry(one: TokenLogprob) -> dict[str, Any]:
    text = one.decoded_token
    return {"token": text, "logprob": one.logprob, "bytes": None if HALF in text else list(text.encode())}
