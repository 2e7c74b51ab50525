"""Turns the text of a request into token ids: its prompt, and the words that bias or forbid tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.api.limits import EngineLimits
from paged_backend.api.request import check_prompt_length
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.trace import recorded
from paged_backend.server.arrival import Arrival
from paged_backend.server.wire.read import read_prompt
from paged_backend.text.conversation import MESSAGE_KEYS, check_count, check_keys
from paged_backend.text.templates import render
from paged_backend.text.tokenizing import PromptTokenizer
from paged_backend.text.typed_tokens import TypedTokens

Tokens = TypeVar("Tokens", list[int], np.ndarray)
Encode = Callable[..., list[int]]  # PromptTokenizer.encode or encode_long


class PromptEncoder:
    """Encodes with the model's tokenizer and chat template, within the limits of the model and of the options."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limits: EngineLimits,
        *,
        max_chars: int | None,
        tokenize_timeout: float,
        template_timeout: float,
        typed_tokens: bool = False,
    ):
        """max_chars: maximum length of a prompt text; None: the maximum for a prompt within max_model_len.
        tokenize_timeout, template_timeout: seconds for a long prompt, and for rendering the chat template.
        typed_tokens: whether special tokens that a client types into a conversation count as such, not as text."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._keeps_first = limits.embedding is not None and limits.embedding.keeps_first
        # A longer text cannot fit max_model_len. Tokenizing a text of megabytes to find out would take seconds.
        longest = limits.max_model_len * max(map(len, tokenizer.get_vocab()))
        self._max_chars = min(longest, max_chars or longest)
        self._template_timeout = template_timeout
        self._prompt_tokenizer = PromptTokenizer(tokenizer, tokenize_timeout)
        template = tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else [template or ""]
        self._message_keys = MESSAGE_KEYS.union(*(re.findall(r"[a-z]\w*", text) for text in texts))
        self._typed_tokens = None if typed_tokens else TypedTokens(tokenizer)

    def read(self, arrival: Arrival) -> Arrival:
        """Return the request with its JSON read, and its conversation. Raises RequestError for one that is invalid."""
        call, turn, limits = read_prompt(arrival.call, self._limits.input_limits), arrival.turn, self._limits
        if call.pooling:
            checked = call.pooling.checked(limits)
            call = replace(call, pooling=checked, input_ids=checked.ids)
        messages = turn.conversation(call.messages) if turn and call.messages else call.messages
        if call.messages is not None:
            check_keys(call.messages, self._message_keys)
        if messages is not None:
            check_count(messages, limits.input_limits)
        if turn:
            limits.input_limits.check("max_json_chars", "messages", turn.num_chars, "characters")
        if call.prompt is not None:
            self.check_length(call.prompt_field, call.prompt)
        return replace(arrival, call=call, messages=messages)

    def encode(self, arrival: Arrival) -> list[int]:
        """Return the token ids of the prompt, after those of the session's earlier turns."""
        with recorded(arrival.trace, "tokenize"):
            return self._encode_prompt(arrival, self._prompt_tokenizer.encode)

    def encode_long(self, arrival: Arrival) -> list[int]:
        """Like `encode`, with a time limit. For one thread at a time."""
        with recorded(arrival.trace, "tokenize"):
            return self._encode_prompt(arrival, self._prompt_tokenizer.encode_long)

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of text that is not a prompt, without special tokens."""
        return self._prompt_tokenizer.encode("text", text)

    def check_length(self, field: str, text: str) -> None:
        """Raise RequestError if the text is longer than any prompt can be."""
        if len(text) > self._max_chars:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"{field}: {len(text)} characters; must be at most {self._max_chars}"
                " (max_prompt_chars; by default the most characters that a prompt within"
                f" max_model_len={self._limits.max_model_len} can have)",
            )

    def expand_word_bias(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters with the bias of each word added to all of its tokens."""
        if not sampling.word_bias:
            return sampling
        biases = dict(sampling.logit_bias)
        for word, bias in sampling.word_bias:
            for token in self.encode_text(word):
                if token < self._limits.vocab_size:  # tokens beyond the vocabulary are never generated
                    biases[token] = biases.get(token, 0.0) + bias
        self._limits.input_limits.check("max_logit_biases", "word_bias", len(biases), "tokens with those of logit_bias")
        return replace(sampling, logit_bias=tuple(sorted(biases.items())))

    def encode_bad_words(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences to forbid: each word as it is tokenized after a space, and without one."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in sampling.bad_words:
            bare = word.lstrip() or word
            found = [tuple(self.encode_text(text)) for text in (bare, f" {bare}")]
            if not all(found):
                raise invalid_argument("bad_words", word, "has no tokens")
            sequences |= dict.fromkeys(found)
        possible = (sequence for sequence in sequences if max(sequence) < self._limits.vocab_size)
        return (*possible, *sampling.bad_words_token_ids)

    def _encode_prompt(self, arrival: Arrival, encode: Encode) -> list[int]:
        call, sampling, turn = arrival.call, arrival.sampling, arrival.turn
        earlier = turn.earlier_tokens() if turn and call.messages is None else []
        if call.input_ids is not None:
            return earlier + self._check_token_ids(self._cut(call.input_ids, sampling), sampling)
        if call.prompt is None:
            return earlier + self._cut(self._encode_chat(arrival, encode), sampling)
        special = sampling.add_special_tokens and not earlier  # they only start a prompt
        tokens = encode(call.prompt_field, call.prompt, special=special)
        kept = self._cut(tokens, sampling)
        if special and self._keeps_first and len(kept) < len(tokens) and tokens[-1] in self._tokenizer.all_special_ids:
            kept[-1] = tokens[-1]  # what ends a sequence
        return earlier + kept

    def _encode_chat(self, arrival: Arrival, encode: Encode) -> list[int]:
        """Return the token ids of a conversation. Special tokens are those of the chat template."""
        call = arrival.call
        assert arrival.messages is not None
        messages, tools, variables, marks = arrival.messages, call.tools, call.template_variables, None
        if self._typed_tokens:
            (messages, tools, variables), marks = self._typed_tokens.hide([messages, tools, variables])
        text = render(self._tokenizer, messages, tools, self._template_timeout, variables)
        if marks is None:
            self.check_length(call.prompt_field, text)
            return encode(call.prompt_field, text, special=False)
        pieces = list(marks.pieces(text))
        self.check_length(call.prompt_field, "".join(piece for piece, _ in pieces))
        found = [encode(call.prompt_field, piece, special=False, literal=literal) for piece, literal in pieces]
        return [token for tokens in found for token in tokens]

    def _cut(self, tokens: Tokens, sampling: SamplingParams) -> Tokens:
        """Return at most `truncate_prompt_tokens` of the tokens: the first ones for an encoder, otherwise the last."""
        if sampling.truncate_prompt_tokens is None:
            return tokens
        # A token is left to generate if any is to be: the context length itself is more than a prompt can have.
        kept = min(sampling.truncate_prompt_tokens, self._limits.max_model_len - min(sampling.max_tokens, 1))
        return tokens[:kept] if self._keeps_first else tokens[-kept:]

    def _check_token_ids(self, ids: np.ndarray, sampling: SamplingParams) -> list[int]:
        """Raise RequestError if there are too many token ids, or one is outside the vocabulary."""
        check_prompt_length(len(ids), sampling.max_tokens, self._limits)
        last = self._limits.vocab_size - 1
        (wrong,) = np.nonzero((ids < 0) | (ids > last))
        if len(wrong):
            raise invalid_argument(f"input_ids[{wrong[0]}]", int(ids[wrong[0]]), f"must be 0..{last}")
        return ids.tolist()
