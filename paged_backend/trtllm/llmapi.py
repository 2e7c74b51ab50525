"""Requests and responses of TensorRT-LLM's model over its LLM API: one prompt per request, without a batch dimension.

Every response of a stream has the whole text so far, as with that model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_backend.api.errors import invalid_argument
from paged_backend.trtllm.requests import NOT_DECOUPLED
from paged_backend.trtllm.responses import Outputs, perf_metrics
from paged_backend.trtllm.rows import Row, Tensors, parameters_of, reject_unsupported
from paged_backend.trtllm.tensors import LLMAPI, LLMAPI_OUTPUTS, NUMPY_TYPES

MAX_TOKENS = 32  # default of TensorRT-LLM's LLM API
_RETURNED = ("finish_reason", "stop_reason", "cumulative_logprob")


@dataclass
class RowRequest:
    """A request to the engine, and what its client gets of the responses."""

    tensors: dict[str, np.ndarray]  # the engine's inputs
    returned: tuple[str, ...]  # names of the outputs to return in addition to the text
    renamed: dict[str, str]  # the client's tensor of each sampling parameter
    text: bytes = b""  # text so far


def read(tensors: Tensors, *, streams: bool) -> list[RowRequest]:
    """Return one RowRequest. Raises RequestError for invalid or unsupported input.

    streams: whether the model may send several responses (`decoupled`).
    """
    row = Row(LLMAPI, tensors)
    reject_unsupported(row)
    parameters, names = parameters_of(row)
    _set_sampling(parameters)
    parameters.setdefault("max_tokens", MAX_TOKENS)
    if not parameters.get("lora_name"):
        parameters.pop("lora_name", None)
    stream = row.one("streaming", False)
    if stream and not streams:
        raise invalid_argument("streaming", True, NOT_DECOUPLED)
    returned = tuple(name for name in _RETURNED if row.one(f"return_{name}", False))
    asked = {
        "stream": stream,
        "exclude_input_in_output": stream or row.one("sampling_param_exclude_input_from_output", False),
        "return_receipt": row.one("sampling_param_return_perf_metrics", False),
    } | dict.fromkeys((f"return_{name}" for name in returned), True)
    texts = {"text_input": row.one("text_input"), "sampling_parameters": json.dumps(parameters)}
    engine = {name: np.array([value]) for name, value in asked.items() if value}
    engine |= {name: np.array([text.encode()], dtype=np.object_) for name, text in texts.items()}
    return [RowRequest(engine, returned, names)]


def _set_sampling(parameters: dict[str, Any]) -> None:
    """Sample greedily unless the client sets a sampling parameter; then the others filter nothing by default."""
    given = {name: parameters[name] for name in ("temperature", "top_k", "top_p") if name in parameters}
    if not given or given.get("top_k") == 1 or 0 in (given.get("temperature"), given.get("top_p")):
        for name in given:
            del parameters[name]
        parameters["temperature"] = 0


def write(row_request: RowRequest, response: Mapping[str, np.ndarray]) -> Iterator[Outputs]:
    """Yield one response."""
    row_request.text += response["text_output"][0]
    values: dict[str, Any] = {"text_output": [row_request.text]} | {
        name: response[name] for name in row_request.returned
    }
    if "receipt" in response:
        metrics = _perf_metrics(json.loads(bytes(response["receipt"][0])))
        values |= {name: [value] for name, value in metrics.items()}
    yield {name: np.asarray(value, NUMPY_TYPES[LLMAPI_OUTPUTS[name].data_type]) for name, value in values.items()}


def _perf_metrics(receipt: Mapping[str, Any]) -> dict[str, float]:
    metrics = perf_metrics(receipt)
    reused, missed = metrics.pop("kv_cache_reused_blocks"), receipt["blocks_missed"]
    return metrics | {
        "kv_cache_reused_block": reused,
        "kv_cache_missed_block": missed,
        "kv_cache_hit_rate": reused / max(1, reused + missed),
    }
