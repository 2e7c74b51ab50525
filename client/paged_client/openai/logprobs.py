"""Log probabilities in the formats of OpenAI's completions and chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paged_client.types import Completion, Logprobs, TokenLogprob

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


def echo_logprobs(first: Completion, count: int, *, by_id: bool) -> dict[str, Any]:
    """Return the `logprobs` of the prompt for a completion with `echo`.

    The first prompt token has no log probability; no token has one if the request ended before its prefill.

    Args:
        first: the first sample, which has the prompt's fields.
        count: the most likely tokens in each place, besides the prompt's.
        by_id: whether tokens are named by their ids, as by `named_by_id`.
    """
    offsets = first.prompt_text_offsets or ()
    known = [entries for entries in most_likely(first.prompt_logprobs or (), count) if entries]
    ends = [*offsets[1:], (first.text_offsets or (len(first.text),))[0]]
    rest = completion_logprobs(named_by_id(known) if by_id else known, offsets[1:])
    missing = [None] * (len(offsets) - len(rest["tokens"]))
    tokens = [first.text[slice(*both)] for both in zip(offsets, ends, strict=False)][: len(missing)]
    if first.first_prompt_token is not None:
        tokens[:1] = [first.first_prompt_token]
    if by_id and first.prompt_token_ids:
        tokens = [f"token_id:{token}" for token in first.prompt_token_ids[: len(missing)]]
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
            {**_entry(entries[0]), "top_logprobs": [_entry(entry) for entry in _most_likely_first(entries)[:count]]}
            for entries in tokens
        ],
        "refusal": None,
    }


def named_by_id(tokens: Sequence[Logprobs]) -> tuple[Logprobs, ...]:
    """Return log probabilities with `token_id:5` instead of the text of each token, as in vLLM.

    The texts of tokens need not be unique, nor valid UTF-8.
    """
    return tuple(
        tuple(replace(entry, decoded_token=f"token_id:{entry.token_id}") for entry in entries) for entries in tokens
    )


def most_likely(tokens: Sequence[Logprobs | None], count: int) -> list[Logprobs | None]:
    """Return each prompt token, and the `count` most likely in its place."""
    return [entries and (entries[0], *(entry for entry in entries[1:] if entry.rank <= count)) for entries in tokens]


def prompt_logprobs_by_id(entries: Logprobs | None) -> dict[str, dict[str, Any]] | None:
    """Return an element of vLLM's `prompt_logprobs`: entries by token id, None for the first token."""
    if entries is None:
        return None
    return {
        str(entry.token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
        for entry in entries
    }


def _by_text(entries: Logprobs) -> dict[str, float]:
    """Return log probabilities by text. Of tokens with the same text, the most likely counts."""
    return {entry.decoded_token: entry.logprob for entry in reversed(_most_likely_first(entries))}


def _most_likely_first(entries: Logprobs) -> list[TokenLogprob]:
    return sorted(entries, key=lambda entry: -entry.logprob)


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    text = entry.decoded_token
    has_bytes = REPLACEMENT_CHARACTER not in text
    return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode()) if has_bytes else None}
