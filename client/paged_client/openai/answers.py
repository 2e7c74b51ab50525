"""Builds the response bodies of OpenAI's API from the engine's output."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from paged_client.openai import logprobs
from paged_client.openai.chat_schema import ChatRequest
from paged_client.openai.schema import CompletionRequest, GenerateBody
from paged_client.openai.tool_calls import ArgumentsDelta, CallStart, Content, OutputParser, ParserEvent
from paged_client.openai.tools import ToolUse
from paged_client.types import Completion, Delta, Logprobs, PromptInfo

Part = TypeVar("Part", Completion, Delta)


class ResponseBuilder(ABC):
    """Builds the response to one request: a whole body, or the chunks of a stream, which share an id."""

    prefix: str  # prefix of the response id
    whole_object: str  # value of `object` in a whole response
    chunk_object: str  # value of `object` in a chunk

    def __init__(self, request: GenerateBody, request_id: str) -> None:
        self.id = f"{self.prefix}-{request_id}"
        self.model = request.model  # name in the response; the gateway sets it if the request has none
        self._created = int(time.time())
        self._prompt_logprobs = request.prompt_logprobs
        self._names_ids = bool(request.return_tokens_as_token_ids)
        self._wants_ids = bool(request.return_token_ids)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for completion in completions:
            completion = replace(self._shown(completion), others=tuple(map(self._shown, completion.others)))
            choices += self._choices(len(choices), completion)
        body = self._body(self.whole_object, choices) | self._top_level_fields(completions[0])
        return body | {"usage": usage(completions)} | _digests(completions)

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """Return the chunk of a delta, or None if it has no content for the client."""
        choice = self._chunk_choice(self._shown(delta))
        return None if choice is None else self._body(self.chunk_object, [choice]) | self._top_level_fields(delta)

    def usage_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self._body(self.chunk_object, []) | {"usage": usage(completions)} | _digests(completions)

    def _shown(self, part: Part) -> Part:
        """Return the output with its token ids where the client asked for them."""
        if self._names_ids and part.logprobs:
            part = replace(part, logprobs=logprobs.named_by_id(part.logprobs))
        return part if self._wants_ids else replace(part, token_ids=None)

    def _prompt_fields(self, info: PromptInfo) -> dict[str, Any]:
        """Return the requested fields about the prompt.

        As in vLLM, they are part of each choice of a completion, and at the top level of a chat completion.
        """
        fields: dict[str, Any] = {}
        if self._wants_ids and info.prompt_token_ids is not None:
            fields["prompt_token_ids"] = info.prompt_token_ids
        if self._prompt_logprobs is not None and info.prompt_logprobs is not None:
            known = logprobs.most_likely(info.prompt_logprobs, self._prompt_logprobs)
            fields["prompt_logprobs"] = [logprobs.prompt_logprobs_by_id(entries) for entries in known]
        return fields

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.model, "choices": choices}

    def _choices(self, start: int, completion: Completion) -> list[dict[str, Any]]:
        """Return the choices of one prompt, numbered from `start`."""
        return [
            self._whole_choice(start + index, sample) for index, sample in enumerate((completion, *completion.others))
        ]

    def _top_level_fields(self, info: PromptInfo) -> dict[str, Any]:
        """Return further fields of the body."""
        return {}

    @abstractmethod
    def _whole_choice(self, index: int, sample: Completion) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, delta: Delta) -> dict[str, Any] | None: ...


class CompletionResponseBuilder(ResponseBuilder):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, request_id: str) -> None:
        super().__init__(request, request_id)
        self._echo_logprobs = request.logprobs if request.echo else None

    def _choices(self, start: int, completion: Completion) -> list[dict[str, Any]]:
        choices = [choice | self._prompt_fields(completion) for choice in super()._choices(start, completion)]
        if self._echo_logprobs is not None:
            echoed = logprobs.echo_logprobs(completion, self._echo_logprobs, by_id=self._names_ids)
            for choice in choices:
                choice["logprobs"] = {name: echoed[name] + values for name, values in choice["logprobs"].items()}
        return choices

    def _whole_choice(self, index: int, sample: Completion) -> dict[str, Any]:
        return self._choice(index, sample)

    def _chunk_choice(self, delta: Delta) -> dict[str, Any] | None:
        return self._choice(delta.index, delta) | self._prompt_fields(delta) if _has_content(delta) else None

    def _choice(self, index: int, part: Completion | Delta) -> dict[str, Any]:
        values = None if part.logprobs is None else logprobs.completion_logprobs(part.logprobs, part.text_offsets or ())
        return _choice(index, part, part.finish_reason, values, text=part.text)


class ChatResponseBuilder(ResponseBuilder):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, request_id: str, use: ToolUse) -> None:
        super().__init__(request, request_id)
        self._top_logprobs = request.top_logprobs or 0
        self._empty_content = None if use.forced else ""
        self._has_reasoning = request.include_reasoning is not False
        echoed = [message.text for message in request.messages[-1:] if request.echo and message.role == "assistant"]
        self._echoed = "".join(echoed)
        self._parsers: defaultdict[int, OutputParser] = defaultdict(use.make_parser)  # parsers by sample
        self._calling: set[int] = set()  # samples that have called a tool

    def _top_level_fields(self, info: PromptInfo) -> dict[str, Any]:
        return self._prompt_fields(info)

    def _whole_choice(self, index: int, sample: Completion) -> dict[str, Any]:
        parsed = self._parse(index, sample)
        content = None if "tool_calls" in parsed else self._empty_content
        message = {"role": "assistant", "content": content, "refusal": None, **parsed}
        for call in parsed.get("tool_calls", ()):
            del call["index"]
        reason = self._finish_reason(index, sample)
        return _choice(index, sample, reason, self._logprobs(sample.logprobs), message=message)

    def _chunk_choice(self, delta: Delta) -> dict[str, Any] | None:
        role = {} if delta.index in self._parsers else {"role": "assistant", "content": self._empty_content}
        message = role | self._parse(delta.index, delta)
        if not message and not _has_content(replace(delta, text="")):
            return None
        reason = self._finish_reason(delta.index, delta)
        return _choice(delta.index, delta, reason, self._logprobs(delta.logprobs or None), delta=message)

    def _parse(self, index: int, part: Completion | Delta) -> dict[str, Any]:
        """Return the message fields that a part of a sample adds."""
        events: list[ParserEvent] = [Content(self._echoed)] if self._echoed and index not in self._parsers else []
        parser = self._parsers[index]
        events += parser.push(part.text) + (parser.finish() if part.finish_reason else [])
        if any(isinstance(event, CallStart) for event in events):
            self._calling.add(index)
        text = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = part.reasoning_content if self._has_reasoning else None
        fields = {"reasoning_content": reasoning, "content": text, "tool_calls": _tool_calls(events)}
        return {name: value for name, value in fields.items() if value}

    def _finish_reason(self, index: int, part: Completion | Delta) -> str | None:
        """Return "tool_calls" if the sample stopped after complete calls: a stop string can end one in the middle."""
        called = part.finish_reason == "stop" and index in self._calling and self._parsers[index].complete
        return "tool_calls" if called else part.finish_reason

    def _logprobs(self, tokens: Sequence[Logprobs] | None) -> dict[str, Any] | None:
        return None if tokens is None else logprobs.chat_logprobs(tokens, self._top_logprobs)


def _tool_calls(events: Sequence[ParserEvent]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            calls[event.call] = {
                "index": event.call, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function
            }  # fmt: skip
        elif isinstance(event, ArgumentsDelta):
            call = calls.setdefault(event.call, {"index": event.call, "function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
    return list(calls.values())


def _has_content(delta: Delta) -> bool:
    return bool(delta.text or delta.finish_reason or delta.logprobs or delta.token_ids or delta.prompt_logprobs)


def _choice(
    index: int, part: Completion | Delta, finish_reason: str | None, logprobs: dict[str, Any] | None, **output: Any
) -> dict[str, Any]:
    choice = {"index": index, **output, "logprobs": logprobs, "finish_reason": finish_reason}
    if finish_reason == "timeout":  # OpenAI's API has no such finish reason
        choice |= {"finish_reason": "length", "stop_reason": "timeout"}
    return choice if part.token_ids is None else choice | {"token_ids": part.token_ids}


def _digests(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the digest of each choice, if the request asked for them."""
    digests = [digest for completion in completions for digest in (completion.receipt or {}).get("logits_digests", ())]
    return {"logits_digests": digests} if digests else {}


def usage(completions: Sequence[Completion]) -> dict[str, Any]:
    output = sum(sample.num_output_tokens for completion in completions for sample in (completion, *completion.others))
    counts = _counts(sum(completion.num_input_tokens for completion in completions), output)
    receipts = [completion.receipt for completion in completions if completion.receipt]
    if receipts:
        counts["prompt_tokens_details"] = {"cached_tokens": sum(receipt["cached_tokens"] for receipt in receipts)}
    return counts


class RunningUsage:
    """The usage of each choice so far, which vLLM's `continuous_usage_stats` returns with every chunk."""

    def __init__(self) -> None:
        self._output: Counter[int] = Counter()

    def add(self, delta: Delta) -> dict[str, Any]:
        self._output[delta.index] += delta.num_output_tokens
        return _counts(delta.num_input_tokens, self._output[delta.index])


def _counts(prompt: int, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
