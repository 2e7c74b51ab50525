"""Converts the engine's responses to tensorrtllm_backend's tensors.

As in tensorrtllm_backend, text has the shape [beams], and everything else a batch dimension of 1 first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paged_backend.trtllm.requests import RowRequest
from paged_backend.trtllm.tensors import CORE_OUTPUTS, NUMPY_TYPES, TEXT_OUTPUTS

Outputs = dict[str, np.ndarray]


def is_last(response: Mapping[str, np.ndarray]) -> bool:
    """Return whether the response ends the row."""
    return all(reason != b"None" for reason in response["finish_reason"])


def write(row_request: RowRequest, response: Mapping[str, np.ndarray]) -> Iterator[Outputs]:
    """Yield one response per sample that has new output, or one for all beams."""
    if row_request.samples == 1:
        yield _outputs(row_request, response, range(row_request.beams), None)
        return
    last = is_last(response)
    for index in range(row_request.samples):
        if response["num_output_tokens"][index] or response["text_output"][index] or last:
            yield _outputs(row_request, response, range(index, index + 1), index)


def _outputs(
    row_request: RowRequest, response: Mapping[str, np.ndarray], which: range, sequence_index: int | None
) -> Outputs:
    """Return the output tensors for the samples `which` of the engine's response."""
    values: dict[str, Any] = {}
    counts = [int(count) for count in response["num_output_tokens"]] if "num_output_tokens" in response else []
    if row_request.token_ids:
        lines = _lines(row_request, response, counts, which)
        values["output_ids"] = [_padded(lines, row_request.pad_id)]
        values["sequence_length"] = [[len(line) for line in lines]]
        counts[which.start : which.stop] = [len(line) for line in lines]
    else:
        values["text_output"] = response["text_output"][which.start : which.stop]
    if row_request.log_probs:
        values["cum_log_probs"] = [response["cumulative_logprob"][which.start : which.stop]]
        values["output_log_probs"] = [_padded([_logprobs(bytes(response["logprobs"][at])) for at in which], 0.0)]
    if row_request.batch_index is not None:
        values["batch_index"] = [[row_request.batch_index]]
    if sequence_index is not None:
        values["sequence_index"] = [[sequence_index]]
    if row_request.num_input_tokens:
        values["num_input_tokens"] = response["num_input_tokens"].reshape(1, 1)
    if row_request.num_output_tokens:
        values["num_output_tokens"] = [[sum(counts[which.start : which.stop])]]
    if "receipt" in response:
        metrics = perf_metrics(json.loads(bytes(response["receipt"][0])))
        values |= {name: [[value]] for name, value in metrics.items()}
    table = CORE_OUTPUTS if row_request.token_ids else TEXT_OUTPUTS
    return {name: np.asarray(value, NUMPY_TYPES[table[name].data_type]) for name, value in values.items()}


def _lines(
    row_request: RowRequest, response: Mapping[str, np.ndarray], counts: list[int], which: range
) -> list[list[int]]:
    """Return the token ids of each sample.

    As in TensorRT-LLM, the token that ends an output is not part of it, unless it belongs to a stop word.
    """
    lines = []
    for at in which:
        begin = sum(counts[:at])
        line = response["token_ids"][begin : begin + counts[at]].tolist()
        if response["finish_reason"][at] == b"stop" and line and response["stop_reason"][at] in row_request.dropped:
            line.pop()
        lines.append([*row_request.prompt, *line])
    return lines


def _padded(lines: list[list[Any]], padding: Any) -> list[list[Any]]:
    longest = max(map(len, lines))
    return [line + [padding] * (longest - len(line)) for line in lines]


def _logprobs(entries: bytes) -> list[float]:
    """Return the logprob of each generated token, which is the first entry of its JSON object."""
    return [next(iter(token.values()))["logprob"] for token in json.loads(entries)]


def perf_metrics(receipt: Mapping[str, Any]) -> dict[str, float]:
    """Return the content of a receipt under TensorRT-LLM's names."""
    new, reused = receipt["blocks_new"], receipt["blocks_reused"]
    drafted, accepted = receipt["guessed_tokens"], receipt["accepted_tokens"]
    return {
        "kv_cache_alloc_new_blocks": new,
        "kv_cache_reused_blocks": reused,
        "kv_cache_alloc_total_blocks": new + reused,
        "arrival_time_ns": receipt["arrival_time_ns"],
        "first_scheduled_time_ns": receipt["first_scheduled_time_ns"],
        "first_token_time_ns": receipt["first_token_time_ns"],
        "last_token_time_ns": receipt["last_token_time_ns"],
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "total_accepted_draft_tokens": accepted,
        "total_draft_tokens": drafted,
    }
