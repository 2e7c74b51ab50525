"""The engine's answers in OpenAI's shapes."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from client.openai import logprobs
from client.openai.chat_schema import ChatRequest
from client.openai.schema import CompletionRequest, GenerateBody
from client.openai.tool_calls import ArgumentsDelta, CallStart, Content, OutputParser, Piece
from client.openai.tools import ToolUse
from client.types import Completion, Delta, Logprobs, PromptInfo


class ResponseBuilder(ABC):
    """One request's answer: whole, or as the chunks of a stream, all with the same id."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, request: GenerateBody, request_id: str) -> None:
        self.id = f"{self.prefix}-{request_id}"
        self._model = request.model
        self._created = int(time.time())
        self._tells_prompt = request.prompt_logprobs is not None

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for one in completions:
            choices += self._choices(len(choices), one)
        return self._body(self.whole_object, choices) | self._beside(completions[0]) | {"usage": usage(completions)}

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """None where there is nothing to tell yet."""
        piece = self._piece(delta)
        return None if piece is None else self._body(self.chunk_object, [piece]) | self._beside(delta)

    def usage_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self._body(self.chunk_object, []) | {"usage": usage(completions)}

    def _of_prompt(self, told: PromptInfo) -> dict[str, Any]:
        """Of the prompt's tokens, what was asked for. vLLM has it in choices of completions, beside those of chats."""
        fields: dict[str, Any] = {}
        if told.prompt_token_ids is not None:
            fields["prompt_token_ids"] = told.prompt_token_ids
        if self._tells_prompt and told.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [logprobs.prompt_logprobs_by_id(one) for one in told.prompt_logprobs]
        return fields

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _choices(self, start: int, completion: Completion) -> list[dict[str, Any]]:
        """Of one prompt, numbered from `start`."""
        return [self._sample(start + index, one) for index, one in enumerate((completion, *completion.others))]

    def _beside(self, told: PromptInfo) -> dict[str, Any]:
        """What stands beside the choices."""
        return {}

    @abstractmethod
    def _sample(self, index: int, sample: Completion) -> dict[str, Any]: ...

    @abstractmethod
    def _piece(self, delta: Delta) -> dict[str, Any] | None: ...


class CompletionResponseBuilder(ResponseBuilder):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, request_id: str) -> None:
        super().__init__(request, request_id)
        self._echo_logprobs = bool(request.echo) and request.logprobs is not None

    def _choices(self, start: int, completion: Completion) -> list[dict[str, Any]]:
        choices = [one | self._of_prompt(completion) for one in super()._choices(start, completion)]
        if self._echo_logprobs:
            echoed = logprobs.echo_logprobs(completion)
            for choice in choices:
                choice["logprobs"] = {name: echoed[name] + told for name, told in choice["logprobs"].items()}
        return choices

    def _sample(self, index: int, sample: Completion) -> dict[str, Any]:
        return self._choice(index, sample)

    def _piece(self, delta: Delta) -> dict[str, Any] | None:
        return self._choice(delta.index, delta) | self._of_prompt(delta) if _tells(delta) else None

    def _choice(self, index: int, part: Completion | Delta) -> dict[str, Any]:
        told = None if part.logprobs is None else logprobs.completion_logprobs(part.logprobs, part.text_offsets or ())
        return _choice(index, part, part.finish_reason, told, text=part.text)


class ChatResponseBuilder(ResponseBuilder):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, request_id: str, use: ToolUse) -> None:
        super().__init__(request, request_id)
        self._top_logprobs = request.top_logprobs or 0
        self._no_content = None if use.forced else ""
        self._readers: defaultdict[int, OutputParser] = defaultdict(use.reader)
        self._calling: set[int] = set()  # samples that have called a tool

    def _beside(self, told: PromptInfo) -> dict[str, Any]:
        return self._of_prompt(told)

    def _sample(self, index: int, sample: Completion) -> dict[str, Any]:
        read = self._read(index, sample)
        content = None if "tool_calls" in read else self._no_content
        message = {"role": "assistant", "content": content, "refusal": None, **read}
        for call in read.get("tool_calls", ()):
            del call["index"]
        return _choice(index, sample, self._reason(index, sample), self._logprobs(sample.logprobs), message=message)

    def _piece(self, delta: Delta) -> dict[str, Any] | None:
        role = {} if delta.index in self._readers else {"role": "assistant", "content": self._no_content}
        news = role | self._read(delta.index, delta)
        if not news and not _tells(replace(delta, text="")):
            return None
        return _choice(delta.index, delta, self._reason(delta.index, delta), self._logprobs(delta.logprobs), delta=news)

    def _read(self, index: int, part: Completion | Delta) -> dict[str, Any]:
        """What a part of a sample adds to its message."""
        reader = self._readers[index]
        pieces = reader.push(part.text) + (reader.finish() if part.finish_reason else [])
        if any(isinstance(piece, CallStart) for piece in pieces):
            self._calling.add(index)
        text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        calls = _calls(pieces)
        return ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})

    def _reason(self, index: int, part: Completion | Delta) -> str | None:
        """Something else than the end of its calls may have stopped a sample: a stop string in the middle of one."""
        called = part.finish_reason == "stop" and index in self._calling and self._readers[index].whole
        return "tool_calls" if called else part.finish_reason

    def _logprobs(self, tokens: Sequence[Logprobs] | None) -> dict[str, Any] | None:
        return None if tokens is None else logprobs.chat_logprobs(tokens, self._top_logprobs)


def _calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            calls[piece.call] = {
                "index": piece.call, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function
            }  # fmt: skip
        elif isinstance(piece, ArgumentsDelta):
            call = calls.setdefault(piece.call, {"index": piece.call, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
    return list(calls.values())


def _tells(delta: Delta) -> bool:
    return bool(delta.text or delta.finish_reason or delta.logprobs or delta.token_ids or delta.prompt_logprobs)


def _choice(
    index: int, part: Completion | Delta, finish_reason: str | None, told: dict[str, Any] | None, **text: Any
) -> dict[str, Any]:
    choice = {"index": index, **text, "logprobs": told, "finish_reason": finish_reason}
    if finish_reason == "timeout":  # which OpenAI has no word for
        choice |= {"finish_reason": "length", "stop_reason": "timeout"}
    return choice if part.token_ids is None else choice | {"token_ids": part.token_ids}


def usage(completions: Sequence[Completion]) -> dict[str, Any]:
    output = sum(sample.num_output_tokens for one in completions for sample in (one, *one.others))
    counts = _counts(sum(one.num_input_tokens for one in completions), output)
    receipts = [one.receipt for one in completions if one.receipt]
    if receipts:
        counts["prompt_tokens_details"] = {"cached_tokens": sum(one["cached_tokens"] for one in receipts)}
    return counts


class RunningUsage:
    """Of each choice of a stream, what it has taken so far, as vLLM tells it with every chunk."""

    def __init__(self) -> None:
        self._output: Counter[int] = Counter()

    def add(self, delta: Delta) -> dict[str, Any]:
        self._output[delta.index] += delta.num_output_tokens
        return _counts(delta.num_input_tokens, self._output[delta.index])


def _counts(prompt: int, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
