"""Turns the text of a request into token ids: its prompt, and the words that bias or forbid tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.api.limits import UNBOUNDED_MAX_TOKENS, EngineLimits
from paged_backend.api.request import check_prompt_length
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.thinking import ThinkingBudget
from paged_backend.server.wire.call import Call, read_prompt
from paged_backend.server.wire.pooling import PoolingCall
from paged_backend.text import chat_templates
from paged_backend.text.conversation import MESSAGE_KEYS, Message, Tool, check_count, check_keys
from paged_backend.text.reasoning import reasoning_marks
from paged_backend.text.templates import render
from paged_backend.text.tokenizing import PromptTokenizer
from paged_backend.text.typed_tokens import TypedTokens

Tokens = TypeVar("Tokens", list[int], np.ndarray)


class Earlier(NamedTuple):
    """The text of a session before a turn: token ids, or JSON lists of messages."""

    tokens: Sequence[int] = ()
    messages: Sequence[bytes] = ()
    num_chars: int = 0  # length of `messages`


@dataclass(frozen=True)
class Prompt:
    """All that a prompt is made of. It can be sent to another process."""

    call: Call
    sampling: SamplingParams
    earlier: Earlier


class EncodedPrompt(NamedTuple):
    """What the request still needs of its prompt."""

    tokens: list[int]  # including the session's earlier turns
    pooling: PoolingCall | None = None  # without its input
    messages: str | None = None  # the messages of this turn as JSON, in a session
    tools: list[Tool] | None = None  # if the client asks for tool calls


def messages_text(messages: list[Message]) -> str:
    """Return messages as the JSON that a session stores."""
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":"))


class PromptEncoder:
    """Encodes with the model's tokenizer and chat template, within the limits of the model and of the options.

    It can be sent to another process.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limits: EngineLimits,
        *,
        max_chars: int | None,
        template_timeout: float,
        typed_tokens: bool = False,
    ):
        """max_chars: maximum length of a prompt text; None: the maximum for a prompt within max_model_len.
        template_timeout: seconds for rendering the chat template.
        typed_tokens: whether the text of a special token in a conversation becomes that token."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._keeps_first = limits.embedding is not None and limits.embedding.keeps_first
        # A longer text cannot fit max_model_len. Tokenizing a text of megabytes to find out would take seconds.
        longest = limits.max_model_len * max(map(len, tokenizer.get_vocab()))
        self._max_chars = min(longest, max_chars or longest)
        self._template_timeout = template_timeout
        self._prompt_tokenizer = PromptTokenizer(tokenizer)
        texts = chat_templates.sources(tokenizer)
        self._message_keys = MESSAGE_KEYS.union(*(re.findall(r"[a-z]\w*", text) for text in texts))
        self._marks = reasoning_marks("\n".join(texts))
        self._typed_tokens = None if typed_tokens else TypedTokens(tokenizer)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Read the JSON of a prompt, and tokenize it. Raises RequestError for a prompt that is invalid or too long."""
        limits, earlier, sampling = self._limits, prompt.earlier, prompt.sampling
        call = read_prompt(prompt.call, limits.input_limits)
        pooling = call.pooling and call.pooling.checked(limits)
        if pooling:
            call = replace(call, input_ids=pooling.ids)
        if call.messages is None:
            tokens, text = self._encode_plain(call, sampling, list(earlier.tokens)), None
        else:
            check_keys(call.messages, self._message_keys)
            text = messages_text(call.messages) if call.sequence else None
            if text is not None:
                num_chars = earlier.num_chars + len(text)
                limits.input_limits.check("max_json_chars", "messages", num_chars, "characters")
            messages = [*(message for part in earlier.messages for message in json.loads(part)), *call.messages]
            check_count(messages, limits.input_limits)
            tokens = self._cut(self._encode_chat(call, messages), sampling)
        check_prompt_length(len(tokens), sampling.max_tokens, limits)
        pooling = pooling and replace(pooling, input=None, messages=None)
        return EncodedPrompt(tokens, pooling, text, call.tools if "tool_calls" in call.returns else None)

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
            variants = [tuple(self.encode_text(text)) for text in (bare, f" {bare}")]
            if not all(variants):
                raise invalid_argument("bad_words", word, "has no tokens")
            sequences |= dict.fromkeys(variants)
        possible = (sequence for sequence in sequences if max(sequence) < self._limits.vocab_size)
        return (*possible, *sampling.bad_words_token_ids)

    def thinking_budget(self, sampling: SamplingParams) -> ThinkingBudget | None:
        """Return the thinking budget with the marks as tokens. Raises RequestError if the model has no marks."""
        limit = sampling.thinking_token_budget
        if limit is None:
            return None
        begin, end = (tuple(self.encode_text(mark)) for mark in self._marks or ("", ""))
        if not (begin and end) or max(begin + end) >= self._limits.vocab_size:
            raise invalid_argument(
                "thinking_token_budget",
                limit,
                "must be null: the chat template has no known marks of reasoning",
            )
        return ThinkingBudget(limit, begin, end)

    def _encode_plain(self, call: Call, sampling: SamplingParams, earlier: list[int]) -> list[int]:
        """Return the token ids of a prompt that is text or token ids, after the `earlier` ones."""
        if call.input_ids is not None:
            return earlier + self._check_token_ids(self._cut(call.input_ids, sampling), sampling)
        assert call.prompt is not None
        self.check_length(call.prompt_field, call.prompt)
        special = sampling.add_special_tokens and not earlier  # they only start a prompt
        tokens = self._prompt_tokenizer.encode(call.prompt_field, call.prompt, special=special)
        kept = self._cut(tokens, sampling)
        if special and self._keeps_first and len(kept) < len(tokens) and tokens[-1] in self._tokenizer.all_special_ids:
            kept[-1] = tokens[-1]  # the token that ends a sequence
        return earlier + kept

    def _encode_chat(self, call: Call, messages: list[Message]) -> list[int]:
        """Return the token ids of a conversation. Only the chat template adds special tokens, not the tokenizer."""
        encode, field, marks = self._prompt_tokenizer.encode, call.prompt_field, None
        tools, variables = call.tools, call.template_variables
        if self._typed_tokens:
            (messages, tools, variables), marks = self._typed_tokens.hide([messages, tools, variables])
        text = render(self._tokenizer, messages, tools, self._template_timeout, variables)
        if marks is None:
            self.check_length(field, text)
            return encode(field, text)
        pieces = list(marks.pieces(text))
        self.check_length(field, "".join(piece for piece, _ in pieces))
        encoded = [encode(field, piece, literal=literal) for piece, literal in pieces]
        return [token for tokens in encoded for token in tokens]

    def _cut(self, tokens: Tokens, sampling: SamplingParams) -> Tokens:
        """Return at most `truncate_prompt_tokens` of the tokens: the first ones for an encoder, otherwise the last."""
        if sampling.truncate_prompt_tokens is None:
            return tokens
        kept, longest = sampling.truncate_prompt_tokens, self._limits.max_model_len
        if kept == longest:  # leaves room for the output, or for one token if it is not limited
            room = 1 if sampling.max_tokens == UNBOUNDED_MAX_TOKENS else sampling.max_tokens
            kept = max(1, longest - room)
        return tokens[:kept] if self._keeps_first else tokens[-kept:]

    def _check_token_ids(self, ids: np.ndarray, sampling: SamplingParams) -> list[int]:
        """Return token ids as a list. Raises RequestError if there are too many, or one is outside the vocabulary."""
        check_prompt_length(len(ids), sampling.max_tokens, self._limits)
        last = self._limits.vocab_size - 1
        (wrong,) = np.nonzero((ids < 0) | (ids > last))
        if len(wrong):
            raise invalid_argument(f"input_ids[{wrong[0]}]", int(ids[wrong[0]]), f"must be 0..{last}")
        return ids.tolist()
