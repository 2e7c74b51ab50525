"""The engine's answers in OpenAI's shapes."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from client.openai import logprobs
from client.openai.schema import ChatRequest, CompletionRequest
from client.types import Completion, Delta, Logprobs


class Answer(ABC):
    """One request's answer: whole, or as the chunks of a stream, all with the same id."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._model = model
        self._created = int(time.time())

    def whole(self, completion: Completion) -> dict[str, Any]:
        samples = (completion, *completion.others)
        choices = [self._sample(index, sample) for index, sample in enumerate(samples)]
        return self._body(self.whole_object, choices) | {"usage": usage(completion)}

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._body(self.chunk_object, [self._piece(delta)])

    def usage_chunk(self, completion: Completion) -> dict[str, Any]:
        return self._body(self.chunk_object, []) | {"usage": usage(completion)}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    @abstractmethod
    def _sample(self, index: int, sample: Completion) -> dict[str, Any]: ...

    @abstractmethod
    def _piece(self, delta: Delta) -> dict[str, Any]: ...


class CompletionAnswer(Answer):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request.model)
        self._offsets: dict[int, int] = {}  # by sample: where its next token begins

    def _sample(self, index: int, sample: Completion) -> dict[str, Any]:
        return _choice(index, sample, self._logprobs(index, sample.logprobs), text=sample.text)

    def _piece(self, delta: Delta) -> dict[str, Any]:
        return _choice(delta.index, delta, self._logprobs(delta.index, delta.logprobs), text=delta.text)

    def _logprobs(self, index: int, tokens: Sequence[Logprobs] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        *offsets, self._offsets[index] = logprobs.offsets_from(self._offsets.get(index, 0), tokens)
        return logprobs.of_completion(tokens, offsets)


class ChatAnswer(Answer):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request.model)
        self._begun: set[int] = set()  # samples that have had their role
        self._top_logprobs = request.top_logprobs or 0

    def _sample(self, index: int, sample: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": sample.text, "refusal": None}
        return _choice(index, sample, self._logprobs(sample.logprobs), message=message)

    def _piece(self, delta: Delta) -> dict[str, Any]:
        role = {} if delta.index in self._begun else {"role": "assistant"}
        self._begun.add(delta.index)
        return _choice(delta.index, delta, self._logprobs(delta.logprobs), delta={**role, "content": delta.text})

    def _logprobs(self, tokens: Sequence[Logprobs] | None) -> dict[str, Any] | None:
        return None if tokens is None else logprobs.of_chat(tokens, self._top_logprobs)


def _choice(index: int, part: Completion | Delta, told: dict[str, Any] | None, **text: Any) -> dict[str, Any]:
    return {"index": index, **text, "logprobs": told, "finish_reason": part.finish_reason}


def usage(completion: Completion) -> dict[str, Any]:
    prompt = completion.num_input_tokens
    output = sum(sample.num_output_tokens for sample in (completion, *completion.others))
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    if completion.receipt:
        counts["prompt_tokens_details"] = {"cached_tokens": completion.receipt["cached_tokens"]}
    return counts
