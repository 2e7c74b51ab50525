"""Converts a request of a tensorrtllm_backend client, row by row, to requests for the engine's model.

Defaults are TensorRT-LLM's: greedy sampling unless top_k or top_p are set, beam search without a length penalty and
with early stopping, stop words as part of the text. The engine checks the ranges of values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.trtllm.limits import RelayLimits
from paged_backend.trtllm.rows import Row, Tensors, parameters_of, plain, reject_unsupported

_GUIDES = {"json": "json_object", "json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "grammar"}
_FLAGS = ("return_log_probs", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens")

SET_DECOUPLED = "Set `decoupled: true` in config.pbtxt"
NOT_DECOUPLED = f"Streaming is only supported in decoupled mode. {SET_DECOUPLED}"
SEVERAL = f"Several responses are only supported in decoupled mode. {SET_DECOUPLED}"


@dataclass(frozen=True)
class RowRequest:
    """The engine's request for one row, and what the client gets of its responses."""

    tensors: dict[str, np.ndarray]  # the engine's inputs
    batch_index: int | None  # index of the row; None if the request has one row
    samples: int  # number of independent samples, each sent in responses of its own
    beams: int  # width of the beam search, whose beams are sent in one response
    stream: bool
    token_ids: bool  # whether to send token ids instead of text
    pad_id: int
    log_probs: bool
    perf_metrics: bool
    num_input_tokens: bool
    num_output_tokens: bool
    dropped: frozenset[bytes] = frozenset()  # stop reasons whose last token is not part of the output
    prompt: tuple[int, ...] = ()  # token ids to put before the output
    renamed: dict[str, str] = field(default_factory=dict)  # the client's tensor of each sampling parameter


def read(model: str, tensors: Tensors, limits: RelayLimits) -> list[RowRequest]:
    """Return a RowRequest per row. Raises RequestError for malformed, contradictory, excessive or unsupported input."""
    rows = _rows(tensors)
    return [_row_request(Row(model, row), index if len(rows) > 1 else None, limits) for index, row in enumerate(rows)]


def check_one_response(rows: Sequence[RowRequest]) -> None:
    """Raise RequestError for a request with several responses, which a model that is not decoupled cannot send."""
    for row in rows:
        if row.stream:
            raise invalid_argument("streaming" if row.token_ids else "stream", True, NOT_DECOUPLED)
        if row.samples > 1:
            raise invalid_argument("num_return_sequences", row.samples, f"must be 1. {SEVERAL}")
    if len(rows) > 1:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"the request has {len(rows)} rows; must have 1. {SEVERAL}")


def _rows(tensors: Tensors) -> list[dict[str, np.ndarray]]:
    name, first = next(iter(tensors.items()))
    for other, tensor in tensors.items():
        if len(tensor) != len(first):
            reason = f"has {len(tensor)} rows, but {name} has {len(first)}; send the same number"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{other}: {reason}")
    return [{name: tensor[index] for name, tensor in tensors.items()} for index in range(len(first))]


def _row_request(row: Row, batch_index: int | None, limits: RelayLimits) -> RowRequest:
    reject_unsupported(row)
    parameters, names = parameters_of(row)
    samples, beams = _count(row, parameters)
    dropped = _stops(row, parameters)
    names |= {"stop_words_token_ids": "stop_words_list", "bad_words_token_ids": "bad_words_list"}
    _set_sampling(parameters)
    _bias(row, parameters, limits.max_biases)
    _guide(row, parameters)
    flags = {name: row.one(name, False) for name in _FLAGS}
    stream = row.one("streaming" if row.is_core else "stream", False)
    echo = not stream and not row.one("exclude_input_in_output", False)
    prompt = _token_ids(row) if row.is_core else []
    if flags["return_log_probs"]:
        parameters.setdefault("logprobs", 0)
    return RowRequest(
        tensors=_tensors(row, parameters, prompt, flags, stream=stream, echo=echo),
        batch_index=batch_index,
        samples=samples,
        beams=beams,
        stream=stream,
        token_ids=row.is_core,
        pad_id=row.one("pad_id", -1),
        log_probs=flags["return_log_probs"],
        perf_metrics=flags["return_perf_metrics"],
        num_input_tokens=flags["return_num_input_tokens"],
        num_output_tokens=flags["return_num_output_tokens"],
        dropped=dropped,
        prompt=tuple(prompt) if echo else (),
        renamed=names,
    )


def _count(row: Row, parameters: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of samples and of beams, of which at least one is 1."""
    beams = row.one("beam_width", 1)
    returned = row.one("num_return_sequences")
    if beams > 1:
        parameters |= {"beam_width": beams, "n": beams if returned is None else returned}
        return 1, parameters["n"]
    if beams != 1:
        raise invalid_argument("beam_width", beams, "must be at least 1")
    if returned is not None:
        parameters["n"] = returned
    return (1 if returned is None else returned), 1


def _set_sampling(parameters: dict[str, Any]) -> None:
    """Set TensorRT-LLM's defaults, which differ from the engine's."""
    search = "beam_width" in parameters
    top_k, top_p = parameters.pop("top_k", 0), parameters.pop("top_p", 0.0)
    if top_k > 1 or (top_k == 0 and top_p > 0):
        parameters["top_k"] = top_k
        if top_p > 0:
            parameters["top_p"] = top_p
    elif top_k < 0:
        raise invalid_argument("top_k", top_k, "must be at least 0")
    elif not search:
        parameters["temperature"] = 0
    if search:
        parameters.setdefault("length_penalty", 0.0)
        parameters.setdefault("early_stopping", True)
        parameters.pop("seed", None)  # has no effect: a beam search is deterministic
        if parameters.get("top_k") == 0 and parameters.get("top_p") == 1:
            del parameters["top_k"], parameters["top_p"]  # their values filter nothing
    else:
        parameters.pop("length_penalty", None)  # used in beam search only
        parameters.pop("early_stopping", None)


def _stops(row: Row, parameters: dict[str, Any]) -> frozenset[bytes]:
    """Set stop words, stop tokens and bad words.

    Returns the stop reasons whose last token is not part of the output; stop words are part of it.
    """
    if parameters.get("stop"):
        parameters["include_stop_str_in_output"] = True
    words = _words_of_tokens(row, "stop_words_list")
    kept = {word[0] for word in words if len(word) == 1}
    ids = set(kept)
    if (end := row.one("end_id")) is not None:
        if not row.one("guided_decoding_guide_type"):  # a complete structure ends with the model's own end token
            parameters["ignore_eos"] = True  # end_id replaces it; -1 means no end token
        ids |= {end} - {-1}
    if ids:
        parameters["stop_token_ids"] = sorted(ids)
    if several := [word for word in words if len(word) > 1]:
        parameters["stop_words_token_ids"] = several
    if bad := _words_of_tokens(row, "bad_words_list"):
        parameters["bad_words_token_ids"] = bad
    return frozenset(str(token).encode() for token in {None, *ids} - kept)


def _words_of_tokens(row: Row, name: str) -> list[list[int]]:
    """Return words of token ids from a tensor [[ids of all words concatenated], [end of each word, then -1]]."""
    lists = row.tensors.get(name)
    if lists is None or lists.size == 0:
        return []
    ids, ends = lists[0].tolist(), [end for end in lists[1].tolist() if end != -1]
    begins = [0, *ends[:-1]] if ends else []
    for begin, end in zip(begins, ends, strict=True):
        if not begin < end <= len(ids):
            raise invalid_argument(name, ends, f"must be the increasing ends of words, at most {len(ids)}")
    return [ids[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _bias(row: Row, parameters: dict[str, Any], limit: int) -> None:
    """Set the biases of words and of tokens."""
    words, weights = row.all("embedding_bias_words"), row.all("embedding_bias_weights")
    if len(words) != len(weights):
        raise invalid_argument(
            "embedding_bias_weights", weights, f"must have as many elements as embedding_bias_words, {len(words)}"
        )
    if len(words) > limit:
        raise invalid_argument(
            "embedding_bias_words", f"{len(words)} words", f"must be at most {limit} words (max_biases)"
        )
    if bias := {word: weight for word, weight in zip(words, weights, strict=True) if word}:
        parameters["word_bias"] = bias
    tokens = row.tensors.get("embedding_bias", np.empty(0))
    biased = np.flatnonzero(tokens)
    if len(biased) > limit:
        raise invalid_argument(
            "embedding_bias", f"{len(biased)} tokens", f"must be at most {limit} that are not 0 (max_biases)"
        )
    if len(biased):
        parameters.setdefault("logit_bias", {}).update(
            {str(token): plain("embedding_bias", tokens[token]) for token in biased.tolist()}
        )


def _guide(row: Row, parameters: dict[str, Any]) -> None:
    """Set the structured output parameter."""
    kind, guide = row.one("guided_decoding_guide_type") or None, row.one("guided_decoding_guide") or None
    if kind is None and guide is None:
        return
    if kind not in _GUIDES:
        raise invalid_argument("guided_decoding_guide_type", kind, f"must be one of {', '.join(_GUIDES)}")
    if (guide is None) != (kind == "json"):
        which = "is not needed" if guide is not None else "is needed"
        raise invalid_argument("guided_decoding_guide", guide, f"{which} with guided_decoding_guide_type={kind}")
    parameters[_GUIDES[kind]] = True if guide is None else guide


def _token_ids(row: Row) -> list[int]:
    """Return the prompt of a row of token ids."""
    ids = row.tensors.get("input_ids")
    if ids is None:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "input_ids: missing; give the prompt's token ids")
    length = row.one("input_lengths")
    if not 0 < length <= ids.size:
        raise invalid_argument("input_lengths", length, f"must be 1..{ids.size}, the length of input_ids")
    return ids.reshape(-1)[:length].tolist()


def _tensors(
    row: Row, parameters: dict[str, Any], prompt: Sequence[int], flags: Mapping[str, bool], *, stream: bool, echo: bool
) -> dict[str, np.ndarray]:
    """Return the engine's input tensors."""
    wants_counts = row.is_core or flags["return_num_output_tokens"] or parameters.get("n", 1) > 1
    asked = {
        "stream": stream,
        "exclude_input_in_output": not (echo and not row.is_core),
        "return_finish_reason": True,
        "return_token_ids": row.is_core,
        "return_stop_reason": row.is_core,
        "return_num_input_tokens": flags["return_num_input_tokens"],
        "return_num_output_tokens": wants_counts,
        "return_logprobs": flags["return_log_probs"],
        "return_cumulative_logprob": flags["return_log_probs"],
        "return_receipt": flags["return_perf_metrics"],
    }
    tensors = {name: np.array([value]) for name, value in asked.items() if value}
    tensors["sampling_parameters"] = np.array([json.dumps(parameters).encode()], dtype=np.object_)
    if row.is_core:
        return tensors | {"input_ids": np.array(prompt, dtype=np.int32)}
    return tensors | {"text_input": np.array([row.one("text_input").encode()], dtype=np.object_)}
