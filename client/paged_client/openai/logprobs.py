"""Log probabilities in the formats of OpenAI's completions and chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from paged_client.types import Completion, Delta, Logprobs, TokenLogprob

Part = TypeVar("Part", Completion, Delta)

REPLACEMENT_CHARACTER = "\ufffd"  # text of a token that has a part of a character's bytes


def completion_logprobs(tokens: Sequence[Logprobs], offsets: Sequence[int]) -> dict[str, Any]:
    """Return the `logprobs` of a choice of /v1/completions. The top_logprobs always include the chosen token.

    Args:
        tokens: log probabilities of each token.
        offsets: the character at which each token begins.
    """
    return {
        "tokens": [chosen.decoded_token for chosen, *_ in tokens],
        "token_logprobs": [chosen.logprob for chosen, *_ in tokens],
        "top_logprobs": [_by_text(entries) for entries in tokens],
        "text_offset": list(offsets),
    }


def echo_logprobs(first: Completion) -> dict[str, Any]:
    """Return the `logprobs` of the prompt for a completion with `echo`.

    The first prompt token has no log probability; no token has one if the request ended before its prefill.

    Args:
        first: the first sample, which has the prompt's fields.
    """
    offsets, known = first.prompt_text_offsets or (), first.prompt_logprobs or ()
    ends = [*offsets[1:], (first.text_offsets or (len(first.text),))[0]]
    rest = completion_logprobs([entries for entries in known if entries], offsets[1:])
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
    """Return the `logprobs` of a choice of /v1/chat/completions.

    The `count` top_logprobs include the chosen token only if it is one of the most likely.
    """
    return {
        "content": [
            {**_entry(entries[0]), "top_logprobs": [_entry(one) for one in _most_likely_first(entries)[:count]]}
            for entries in tokens
        ],
        "refusal": None,
    }


def named_by_id(part: Part) -> Part:
    """Return the output with `token_id:5` instead of the text of each token that has a log probability.

    The texts of tokens need not be unique, nor valid UTF-8. As in vLLM.
    """
    part = replace(part, logprobs=part.logprobs and tuple(map(_named, part.logprobs)))
    if part.first_prompt_token is None or not part.prompt_token_ids:
        return part
    first, known = f"token_id:{part.prompt_token_ids[0]}", part.prompt_logprobs or ()
    prompt = tuple(entries and _named(entries) for entries in known)
    return replace(part, first_prompt_token=first, prompt_logprobs=prompt)  # which `echo` shows


def _named(entries: Logprobs) -> Logprobs:
    return tuple(replace(one, decoded_token=f"token_id:{one.token_id}") for one in entries)


def prompt_logprobs_by_id(entries: Logprobs | None) -> dict[str, dict[str, Any]] | None:
    """Return an element of vLLM's `prompt_logprobs`: entries by token id, None for the first token."""
    if entries is None:
        return None
    return {
        str(one.token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for one in entries
    }


def _by_text(entries: Logprobs) -> dict[str, float]:
    """Return log probabilities by text. For tokens with the same text it is that of the most likely one."""
    return {one.decoded_token: one.logprob for one in reversed(_most_likely_first(entries))}


def _most_likely_first(entries: Logprobs) -> list[TokenLogprob]:
    return sorted(entries, key=lambda one: -one.logprob)


def _entry(one: TokenLogprob) -> dict[str, Any]:
    text = one.decoded_token
    has_bytes = REPLACEMENT_CHARACTER not in text
    return {"token": text, "logprob": one.logprob, "bytes": list(text.encode()) if has_bytes else None}
