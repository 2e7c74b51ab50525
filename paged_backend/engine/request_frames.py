"""Requests and outputs of an engine as JSON values, in the frames of the local socket (utils/local_socket.py).

A request is sent as its tokens and parameters. What can be derived from them is not sent: the bitmask of the allowed
tokens, the check for stop strings of a beam search, the grammar and the adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.api.limits import EngineLimits, SamplingDefaults
from paged_backend.api.request import (
    FinishReason,
    GenerateRequest,
    Progress,
    TokenDelta,
    Usage,
    bitmask,
    fit_max_tokens,
)
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.structures import STRUCTURE_PARAMETERS, Structure
from paged_backend.api.thinking import ThinkingBudget
from paged_backend.api.token_outputs import TOKEN_OUTPUTS, read_values, write_values
from paged_backend.text.beam_stops import build_stop_check
from paged_backend.text.tokenizing import decoder
from paged_backend.utils.local_socket import FrameError

FRAMES_VERSION = 5  # raised with each change of the frames: instances with another version exchange none
_KINDS = ("json_schema", "regex", "choice", "grammar")
# Parameters that are not sent: the process that has the stream applies them, or did when it read the request.
_APPLIED = {"seed", "timeout_ms", "truncate_prompt_tokens", "word_bias", "bad_words", *STRUCTURE_PARAMETERS}


def write_request(request: GenerateRequest) -> dict[str, Any]:
    """Return a request as JSON values, without its session, guides and trace. It must generate text."""
    assert not (request.embeds or request.sampling.prefill_only)
    structure, progress, adapter = request.sampling.structure, request.progress, request.adapter
    return {
        "prompt": request.prompt_token_ids,
        "sampling": _write_sampling(request.sampling),
        "structure": structure,
        "seed": request.seed,
        "stop_ids": sorted(request.stop_ids),
        "returns_usage": request.returns_usage,
        "token_outputs": request.token_outputs,
        "bad_words": request.bad_words,
        "marks": request.thinking and [request.thinking.begin, request.thinking.end],
        "progress": progress and [progress.outputs, progress.has_prompt_values, progress.usage],
        "adapter": adapter.digest.hex() if adapter and progress else None,
    }


def _write_sampling(sampling: SamplingParams) -> dict[str, Any]:
    values = {spec.name: getattr(sampling, spec.name) for spec in fields(sampling) if spec.name not in _APPLIED}
    given = {
        spec.name: values[spec.name] for spec in fields(sampling) if values.get(spec.name, spec.default) != spec.default
    }
    written = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in given.items()}
    if sampling.logit_bias:
        written["logit_bias"] = dict(sampling.logit_bias)
    return written


def read_request(values: Any, key: int, limits: EngineLimits, tokenizer: PreTrainedTokenizerBase) -> GenerateRequest:
    """Return a request that another process sent. Raises FrameError if it is malformed, and RequestError if this engine
    cannot run it."""
    if not isinstance(values, dict) or not isinstance(values.get("sampling"), dict):
        raise FrameError("not a request of an engine")
    plain = replace(limits, sampling_defaults=SamplingDefaults())
    prompt, stop_ids = _integers(values, "prompt"), _integers(values, "stop_ids")
    bad_words = tuple(_checked_integers("bad_words", word) for word in _list(values, "bad_words"))
    structure, sampling = _read_structure(values.get("structure")), SamplingParams.parse(values["sampling"], plain)
    if structure:
        sampling = replace(sampling, json_schema=structure)
    if not prompt:
        raise FrameError("prompt: empty")
    fit_max_tokens(len(prompt), sampling, plain)
    progress = _read_progress(values, sampling)
    outputs = [token for output in (progress.outputs if progress else ()) for token in output or ()]
    thinking = _read_thinking(values.get("marks"), sampling)
    marks = (*thinking.begin, *thinking.end) if thinking else ()
    _check_tokens("prompt", (*prompt, *outputs, *marks, *(token for word in bad_words for token in word)), limits)
    allowed, ends = None, None
    if sampling.allowed_token_ids is not None:
        allowed = bitmask(sampling.allowed_token_ids, limits.vocab_size)
    if sampling.beam_width > 1:
        ends = build_stop_check(sampling, prompt, decoder(tokenizer, sampling.skip_special_tokens))
    return GenerateRequest(
        key,
        prompt,
        sampling,
        _typed(values, "seed", int),
        frozenset(stop_ids),
        returns_usage=_typed(values, "returns_usage", bool),
        token_outputs=_read_token_outputs(values.get("token_outputs")),
        bad_words=bad_words,
        thinking=thinking,
        allowed=allowed,
        ends=ends,
        progress=progress,
    )


def _read_structure(value: Any) -> Structure | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(part, str) for part in value):
        raise FrameError("structure: must be a kind, a text and a field")
    if value[0] not in _KINDS:
        raise FrameError(f"structure: unknown kind {value[0]!r}")
    return Structure(*value)


def _read_thinking(value: Any, sampling: SamplingParams) -> ThinkingBudget | None:
    budget = sampling.thinking_token_budget
    if value is None and budget is None:
        return None
    if budget is None or not isinstance(value, list) or len(value) != 2 or not all(value):
        raise FrameError("marks: must be two lists of tokens with thinking_token_budget, and null without")
    return ThinkingBudget(budget, *(_checked_integers("marks", mark) for mark in value))


def _read_token_outputs(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or not all(type(num_top) is int for num_top in value.values()):
        raise FrameError("token_outputs: must be numbers by name")
    for name in value.keys() - TOKEN_OUTPUTS.keys():
        raise FrameError(f"token_outputs: unknown output {name!r}")
    return value


def _read_progress(values: dict[str, Any], sampling: SamplingParams) -> Progress | None:
    value, digest = values.get("progress"), values.get("adapter")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[0], list):
        raise FrameError("progress: must be outputs, a flag and a usage")
    outputs = tuple(None if output is None else _checked_integers("progress", output) for output in value[0])
    if len(outputs) != sampling.num_samples or all(output is None for output in outputs) or sampling.beam_width > 1:
        raise FrameError(f"progress: has {len(outputs)} outputs for {sampling.num_samples} samples")
    if any(len(output) >= max(1, sampling.max_tokens) for output in outputs if output):
        raise FrameError("progress: an output has max_tokens tokens")
    if not isinstance(value[1], bool) or not isinstance(digest, str | None):
        raise FrameError("progress: a value has another type")
    try:
        return Progress(outputs, value[1], _read_usage(value[2]), bytes.fromhex(digest) if digest else b"")
    except ValueError as error:
        raise FrameError(f"adapter: {error}") from None


def _read_usage(value: Any) -> Usage | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != len(Usage._fields) or not all(map(_is_number, value)):
        raise FrameError("usage: must be a list of numbers")
    return Usage._make(value)


def write_delta(request_id: int, delta: TokenDelta) -> dict[str, Any]:
    """Return the output of one step for one sample as JSON values."""
    values: dict[str, Any] = {"id": request_id, "tokens": delta.token_ids}
    if delta.sample:
        values["sample"] = delta.sample
    if delta.finish:
        values["finish"] = delta.finish.value
    if delta.error:
        values["error"] = [delta.error.code.value, str(delta.error)]
    if delta.usage:
        values["usage"] = delta.usage
    if delta.values:
        values["values"] = write_values(delta.values)
    if delta.prompt_values is not None:
        values["prompt_values"] = write_values(delta.prompt_values)
    return values


def read_delta(values: Any, key_of: Callable[[int], int]) -> TokenDelta:
    """Return the output of one step for one sample. key_of: returns the key of a request by its id, or raises KeyError.
    Raises FrameError."""
    try:
        error, finish = values.get("error"), values.get("finish")
        return TokenDelta(
            key_of(values["id"]),
            _checked_integers("tokens", values["tokens"]),
            FinishReason(finish) if finish is not None else None,
            RequestError(ErrorCode(error[0]), str(error[1]), verbatim=True) if error is not None else None,
            _typed({"sample": 0} | values, "sample", int),
            _read_usage(values.get("usage")),
            read_values(values.get("values", {})),
            prompt_values=read_values(values["prompt_values"]) if "prompt_values" in values else None,
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise FrameError(f"invalid output: {type(error).__name__}: {error}") from None


def _check_tokens(field: str, tokens: tuple[int, ...], limits: EngineLimits) -> None:
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < limits.vocab_size:
            raise invalid_argument(field, token, f"must be 0..{limits.vocab_size - 1}")


def _integers(values: dict[str, Any], name: str) -> tuple[int, ...]:
    return _checked_integers(name, values.get(name))


def _checked_integers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise FrameError(f"{name}: must be a list of integers")
    return tuple(value)


def _list(values: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(value := values.get(name), list):
        raise FrameError(f"{name}: must be a list")
    return value


def _typed(values: dict[str, Any], name: str, kind: type) -> Any:
    if type(value := values.get(name)) is not kind:
        raise FrameError(f"{name}: missing, or of another type")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
