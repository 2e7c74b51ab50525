"""The tensors of requests and responses, for both protocols and for the synchronous and the asyncio client."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any

from paged_client.types import Adapter, Completion, Delta, Logprobs, ModelInfo, PagedError, PoolMap, TokenLogprob

# name -> (type, dims), as in model_repository/paged_llm/config.pbtxt.
INPUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "text_input": ("TYPE_STRING", (1,)),
    "messages": ("TYPE_STRING", (1,)),
    "tools": ("TYPE_STRING", (1,)),
    "chat_template_kwargs": ("TYPE_STRING", (1,)),
    "input_ids": ("TYPE_INT32", (-1,)),
    "image": ("TYPE_STRING", (-1,)),
    "stream": ("TYPE_BOOL", (1,)),
    "sampling_parameters": ("TYPE_STRING", (1,)),
    "exclude_input_in_output": ("TYPE_BOOL", (1,)),
    "return_finish_reason": ("TYPE_BOOL", (1,)),
    "return_stop_reason": ("TYPE_BOOL", (1,)),
    "return_cumulative_logprob": ("TYPE_BOOL", (1,)),
    "return_logprobs": ("TYPE_BOOL", (1,)),
    "return_num_input_tokens": ("TYPE_BOOL", (1,)),
    "return_num_output_tokens": ("TYPE_BOOL", (1,)),
    "return_token_ids": ("TYPE_BOOL", (1,)),
    "return_text_offsets": ("TYPE_BOOL", (1,)),
    "return_reasoning_content": ("TYPE_BOOL", (1,)),
    "return_tool_calls": ("TYPE_BOOL", (1,)),
    "return_receipt": ("TYPE_BOOL", (1,)),
    "pool_map": ("TYPE_BOOL", (1,)),
    "adapters": ("TYPE_BOOL", (1,)),
    "model_info": ("TYPE_BOOL", (1,)),
    "stop_request": ("TYPE_BOOL", (1,)),
    "embedding_request": ("TYPE_STRING", (1,)),
    "classification_request": ("TYPE_STRING", (1,)),
    "stop": ("TYPE_STRING", (-1,)),
    "bad_words": ("TYPE_STRING", (-1,)),
    "choice": ("TYPE_STRING", (-1,)),
    "stop_token_ids": ("TYPE_INT32", (-1,)),
    "allowed_token_ids": ("TYPE_INT32", (-1,)),
    "json_schema": ("TYPE_STRING", (1,)),
    "json_object": ("TYPE_BOOL", (1,)),
    "regex": ("TYPE_STRING", (1,)),
    "grammar": ("TYPE_STRING", (1,)),
}
OUTPUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "text_output": ("TYPE_STRING", (-1,)),
    "reasoning_content": ("TYPE_STRING", (-1,)),
    "tool_calls": ("TYPE_STRING", (-1,)),
    "finish_reason": ("TYPE_STRING", (-1,)),
    "stop_reason": ("TYPE_STRING", (-1,)),
    "cumulative_logprob": ("TYPE_FP32", (-1,)),
    "logprobs": ("TYPE_STRING", (-1,)),
    "num_input_tokens": ("TYPE_UINT32", (1,)),
    "num_output_tokens": ("TYPE_UINT32", (-1,)),
    "token_ids": ("TYPE_INT32", (-1,)),
    "prompt_token_ids": ("TYPE_INT32", (-1,)),
    "text_offsets": ("TYPE_INT32", (-1,)),
    "prompt_text_offsets": ("TYPE_INT32", (-1,)),
    "first_prompt_token": ("TYPE_STRING", (1,)),
    "prompt_logprobs": ("TYPE_STRING", (1,)),
    "receipt": ("TYPE_STRING", (1,)),
    "pool_map": ("TYPE_STRING", (1,)),
    "adapters": ("TYPE_STRING", (1,)),
    "model_info": ("TYPE_STRING", (1,)),
    "num_stopped": ("TYPE_UINT32", (1,)),
}

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, or one with `tool_calls`
Prompt = str | Sequence[int]  # text, or token ids
Value = str | bool | int | list[int]
Values = dict[str, Value]  # input name -> its element or list; also REQUEST_PARAMETERS
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
TRACE_CONTEXT = ("traceparent", "tracestate")  # headers of W3C, sent as parameters
REQUEST_PARAMETERS = (*SEQUENCE, *TRACE_CONTEXT)
# Outputs with one element for each token, and its type. They are fields of Delta and Completion.
PER_TOKEN: Mapping[str, Callable[[Any], Any]] = {"token_ids": int, "text_offsets": int}
# Outputs with one element for each sample, and how it is read. They are fields of Delta and Completion as well.
PER_SAMPLE: Mapping[str, Callable[[Any], Any]] = {
    "reasoning_content": str,
    "tool_calls": lambda calls: tuple(json.loads(str(calls))),
}
# Inputs that callers pass as sampling parameters.
RETURN_FLAGS = tuple(f"return_{name}" for name in (*PER_TOKEN, *PER_SAMPLE))
JSON_INPUTS = ("tools", "chat_template_kwargs")  # the same, sent as JSON
Fields = Mapping[str, "Sequence[str | int | float]"]  # output name -> its elements


def request_values(
    prompt: Prompt | None, messages: Sequence[Message] | None, sampling: Mapping[str, object], *, stream: bool
) -> Values:
    """Return the inputs of one request. The server validates the sampling parameters.

    Raises:
        ValueError: both or neither of `prompt` and `messages`; text that is not valid Unicode; invalid token ids; a
            sampling parameter that cannot be encoded as JSON.
    """
    if (prompt is None) == (messages is None):
        raise ValueError("give exactly one of prompt and messages")
    inputs = {name: value for name, value in sampling.items() if name in (*REQUEST_PARAMETERS, *RETURN_FLAGS)}
    in_json = {name: sampling[name] for name in JSON_INPUTS if sampling.get(name) is not None}
    sampling = {name: value for name, value in sampling.items() if name not in (*inputs, *JSON_INPUTS)}
    values: Values = {
        "stream": stream,
        "sampling_parameters": json_object(sampling),
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_receipt": True,
    }
    if sampling.get("logprobs") is not None:
        values |= {"return_logprobs": True, "return_cumulative_logprob": True}
    for name, value in inputs.items():
        values[name] = input_value(name, value)
    if messages is not None:
        values["messages"] = _json("messages", messages)
    elif prompt is None or isinstance(prompt, str):
        values["text_input"] = check_text("prompt", prompt)
    else:
        values["input_ids"] = _token_ids(prompt)
    return values | {name: _json(name, value) for name, value in in_json.items()}


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        ids = [operator.index(token) for token in prompt]  # accepts NumPy integers, too
    except TypeError:
        raise ValueError(f"prompt={prompt!r}: must be a string, or a list of token ids") from None
    wrong = next((index for index, token in enumerate(ids) if not 0 <= token < 2**31), None)
    if wrong is not None:
        raise ValueError(f"prompt[{wrong}]={ids[wrong]}: must be a token id, 0..{2**31 - 1}")
    return ids


def input_value(name: str, value: object) -> str | bool | int:
    if name == "sequence_id":
        if isinstance(value, bool) or not (isinstance(value, str) or (isinstance(value, int) and 0 < value < 2**63)):
            raise ValueError(f"{name}={value!r}: must be a string, or a whole number in 1..{2**63 - 1}")
    elif name in TRACE_CONTEXT:
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r}: must be a string")
    elif not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")
    return value


POOL_MAP_REQUEST: Values = {"pool_map": True}
ADAPTERS_REQUEST: Values = {"adapters": True}
MODEL_INFO_REQUEST: Values = {"model_info": True}
STOP_REQUEST: Values = {"stop_request": True}


def read_pool_map(response: Fields | None) -> PoolMap:
    """Parse the response of a pool map request. Raises PagedError if it is malformed."""
    try:
        values = json.loads(str((response or {})["pool_map"][0]))
        return PoolMap(**{spec.name: values[spec.name] for spec in fields(PoolMap) if spec.name in values})
    except (LookupError, TypeError, ValueError) as error:
        raise PagedError("INTERNAL", f"the server sent no map of its pool: {type(error).__name__}: {error}") from None


def read_model_info(response: Fields | None) -> ModelInfo:
    """Parse the response of a model info request. Raises PagedError if it is malformed."""
    try:
        values = json.loads(str((response or {})["model_info"][0]))
        values["tasks"] = tuple(values["tasks"])
        return ModelInfo(**{spec.name: values[spec.name] for spec in fields(ModelInfo)})
    except (LookupError, TypeError, ValueError) as error:
        reason = f"the server sent no information on its model: {type(error).__name__}: {error}"
        raise PagedError("INTERNAL", reason) from None


def may_stream(sampling: Mapping[str, object]) -> bool:
    """Return whether the output can be streamed. With best_of, the best samples are known only at the end."""
    return sampling.get("best_of") is None


def check_request_id(request_id: str) -> str:
    if not request_id:
        raise ValueError(f"request_id={request_id!r}: must be the id of the request to cancel")
    return request_id


def read_num_stopped(response: Fields | None) -> int:
    """Parse the response of a stop request. Raises PagedError if it is malformed."""
    try:
        return int((response or {})["num_stopped"][0])
    except (LookupError, TypeError, ValueError) as error:
        raise PagedError("INTERNAL", f"the server sent no count: {type(error).__name__}: {error}") from None


def read_adapters(response: Fields | None) -> tuple[Adapter, ...]:
    """Parse the response of an adapter list request. Raises PagedError if it is malformed."""
    names = [field.name for field in fields(Adapter)]
    try:
        adapters = json.loads(str((response or {})["adapters"][0]))
        return tuple(Adapter(**{name: adapter[name] for name in names if name in adapter}) for adapter in adapters)
    except (LookupError, TypeError, ValueError) as error:
        reason = f"the server sent no list of its adapters: {type(error).__name__}: {error}"
        raise PagedError("INTERNAL", reason) from None


def json_object(sampling: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{json.dumps(key)}: {_json(key, value)}" for key, value in sampling.items()) + "}"


def _json(name: str, value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"{name}={value!r}: {error}") from None
    return check_text(name, text)


def check_text(name: str, text: object) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{name}={text!r}: must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: character {error.start} cannot be encoded as UTF-8") from None
    return text


class Transcript:
    """The output of one request so far. Converts responses to deltas, and the deltas to a completion."""

    def __init__(self) -> None:
        self._samples: list[list[Delta]] = [[]]
        self._num_input_tokens = 0
        self._prompt: dict[str, Any] = {}  # the fields of PromptInfo, which may arrive in different responses
        self._pending_prompt: dict[str, Any] = {}  # the part of _prompt that no delta has returned yet
        self._receipt: Mapping[str, Any] | None = None

    @property
    def complete(self) -> bool:
        """True if every sample has its last delta."""
        return all(deltas and deltas[-1].finish_reason for deltas in self._samples)

    def add(self, fields: Fields) -> list[Delta]:
        """Add a response and return its deltas: one for each sample that has new output."""
        texts = fields.get("text_output", [""])
        reasons = fields.get("finish_reason", ["None"] * len(texts))
        counts = fields.get("num_output_tokens", [0] * len(texts))
        self._num_input_tokens = int([*fields.get("num_input_tokens", []), self._num_input_tokens][0])
        logprobs = fields.get("logprobs", ["null"] * len(texts))
        sums = fields.get("cumulative_logprob", [None] * len(texts))
        parts = {name: _split(fields.get(name), counts, read) for name, read in PER_TOKEN.items()}
        parts |= {name: list(map(read, fields[name])) for name, read in PER_SAMPLE.items() if name in fields}
        for receipt in fields.get("receipt", []):
            self._receipt = json.loads(str(receipt))
        self._samples += [[] for _ in range(len(texts) - len(self._samples))]
        new = []
        for index, (text, reason, count, tokens, total) in enumerate(
            zip(texts, reasons, counts, logprobs, sums, strict=True)
        ):
            deltas = self._samples[index]
            delta = Delta(
                text=str(text),
                num_output_tokens=int(count),
                finish_reason=None if reason == "None" else str(reason),
                num_input_tokens=self._num_input_tokens,
                index=index,
                logprobs=_read_logprobs(str(tokens)),
                cumulative_logprob=None if total is None else float(total),
                **{name: values[index] for name, values in parts.items()},
            )
            has_output = len(texts) == 1 or text or count or delta.finish_reason
            if has_output and not (deltas and deltas[-1].finish_reason):
                deltas.append(delta)
                new.append(delta)
        prompt = _read_prompt(fields)
        self._prompt |= prompt
        self._pending_prompt |= prompt
        if self._pending_prompt and new:
            new[0], self._pending_prompt = replace(new[0], **self._pending_prompt), {}
        return new

    def completion(self) -> Completion:
        first, *others = [
            Completion(
                text="".join(delta.text for delta in deltas),
                finish_reason=(deltas[-1].finish_reason if deltas else None) or "cancelled",
                num_input_tokens=self._num_input_tokens,
                num_output_tokens=sum(delta.num_output_tokens for delta in deltas),
                cumulative_logprob=deltas[-1].cumulative_logprob if deltas else None,
                **_joined(deltas),
            )
            for deltas in self._samples
        ]
        return replace(first, others=tuple(others), receipt=self._receipt, **self._prompt)


def _read_prompt(fields: Fields) -> dict[str, Any]:
    names = ("prompt_token_ids", "prompt_text_offsets")
    prompt: dict[str, Any] = {name: tuple(map(int, fields[name])) for name in names if name in fields}
    for text in fields.get("first_prompt_token", []):
        prompt["first_prompt_token"] = str(text)
    for text in fields.get("prompt_logprobs", []):
        prompt["prompt_logprobs"] = tuple(by_id and _entries(by_id) for by_id in json.loads(str(text)))
    return prompt


def _read_logprobs(text: str) -> tuple[Logprobs, ...] | None:
    if text == "null":  # most responses: parsing takes longer
        return None
    return tuple(map(_entries, json.loads(text)))


def _entries(by_id: Mapping[str, Any]) -> Logprobs:
    return tuple(TokenLogprob(int(token), **entry) for token, entry in by_id.items())


def _split(
    values: Sequence[str | int | float] | None, counts: Sequence[str | int | float], read: Callable[[Any], Any]
) -> list[Any]:
    """Split an output with one element for each token into the parts of each sample."""
    if values is None:
        return [None] * len(counts)
    remaining = iter(map(read, values))
    return [tuple(islice(remaining, int(count))) for count in counts]


def _joined(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Return the optional fields of the output, joined; None for a field that was not requested."""
    joined: dict[str, Any] = {}
    for name in ("logprobs", *PER_TOKEN, *PER_SAMPLE):
        parts = [part for delta in deltas if (part := getattr(delta, name)) is not None]
        values = [value for part in parts for value in part]
        joined[name] = None if not parts else "".join(values) if isinstance(parts[0], str) else tuple(values)
    return joined


def check_timeout(timeout: float | None) -> float | None:
    """Return `timeout`. Raises ValueError unless it is None (no limit) or a positive number of seconds."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout}: must be a positive number of seconds, or None")
    return timeout
