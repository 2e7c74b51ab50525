"""Requests and answers of TensorRT-LLM's newer model, over its LLM API: one prompt each, without a batch's dimension.

A client's stream gets the whole text so far with every response, as that model sends it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_backend.api.errors import invalid_argument
from paged_backend.trtllm.replies import Outputs, perf_metrics
from paged_backend.trtllm.rows import Row, Tensors, parameters_of, refuse
from paged_backend.trtllm.tensors import LLMAPI, LLMAPI_OUTPUTS, NUMPY_TYPES

MAX_TOKENS = 32  # where a client gives none
_RETURNED = ("finish_reason", "stop_reason", "cumulative_logprob")


@dataclass
class Ask:
    """What the engine is asked, what of its answers the client wants, and what was said so far."""

    tensors: dict[str, np.ndarray]  # the engine's inputs
    returned: tuple[str, ...]  # of its outputs, beside the text
    renamed: dict[str, str]  # names of parameters to those of the client's tensors
    text: bytes = b""


def read(tensors: Tensors, *, streams: bool) -> list[Ask]:
    """One Ask. Raises RequestError for what is malformed or not served. streams: whether the model is decoupled."""
    row = Row(LLMAPI, tensors)
    refuse(row)
    parameters, names = parameters_of(row)
    _draw(parameters)
    parameters.setdefault("max_tokens", MAX_TOKENS)
    if not parameters.get("lora_name"):
        parameters.pop("lora_name", None)
    stream = row.one("streaming", False)
    if stream and not streams:
        raise invalid_argument(
            "streaming", True, "must be false, since this model's config.pbtxt has `decoupled: false`"
        )
    returned = tuple(name for name in _RETURNED if row.one(f"return_{name}", False))
    asked = {
        "stream": stream,
        "exclude_input_in_output": stream or row.one("sampling_param_exclude_input_from_output", False),
        "return_receipt": row.one("sampling_param_return_perf_metrics", False),
    } | dict.fromkeys((f"return_{name}" for name in returned), True)
    texts = {"text_input": row.one("text_input"), "sampling_parameters": json.dumps(parameters)}
    engine = {name: np.array([value]) for name, value in asked.items() if value}
    engine |= {name: np.array([text.encode()], dtype=np.object_) for name, text in texts.items()}
    return [Ask(engine, returned, names)]


def _draw(parameters: dict[str, Any]) -> None:
    """Greedily, unless a client asks for anything else; what it then leaves out filters nothing."""
    given = {name: parameters[name] for name in ("temperature", "top_k", "top_p") if name in parameters}
    if not given or given.get("top_k") == 1 or 0 in (given.get("temperature"), given.get("top_p")):
        for name in given:
            del parameters[name]
        parameters["temperature"] = 0


def write(ask: Ask, response: Mapping[str, np.ndarray]) -> Iterator[Outputs]:
    """One response."""
    ask.text += response["text_output"][0]
    values: dict[str, Any] = {"text_output": [ask.text]} | {name: response[name] for name in ask.returned}
    if "receipt" in response:
        metrics = _perf_metrics(json.loads(response["receipt"][0]))
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
