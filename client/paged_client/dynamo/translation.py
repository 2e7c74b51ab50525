"""Translates between Dynamo's worker protocol and this engine's requests.

A frontend sends a tokenized request, and gets chunks of token ids (`PreprocessedRequest` and `LLMEngineOutput` in
Dynamo's lib/llm/src/protocols/common). What the engine lacks is rejected by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged_client.pooling import to_base64
from paged_client.types import Completion, Delta, Logprobs

Request = Mapping[str, Any]
Chunk = dict[str, Any]

_PROBE = "_HEALTH_CHECK"  # marks requests of Dynamo's health check
# Groups of fields, and the engine's name of each field.
_FIELDS: dict[str, dict[str, str]] = {
    "sampling_options": {
        name: name
        for name in (
            *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p"),
            *("top_k", "min_p", "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output"),
            *("logit_bias", "allowed_token_ids", "bad_words_token_ids"),
        )
    },
    "stop_conditions": {
        **{name: name for name in ("max_tokens", "stop", "min_tokens", "ignore_eos")},
        "max_thinking_tokens": "thinking_token_budget",
    },
    "output_options": {name: name for name in ("logprobs", "prompt_logprobs")},
    "routing": {"cache_salt": "cache_salt", "lora_name": "lora_name"},
}
_STOP_TOKEN_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")  # the frontend hides them
# Fields that the frontend or the router uses itself, or that `sampling_of` combines.
_FOR_OTHERS = {
    "sampling_options": {"guided_decoding", "detokenize"},
    "stop_conditions": set(_STOP_TOKEN_IDS),
    "output_options": {"skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"},
    "routing": {
        *("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank"),
        *("expected_output_tokens", "priority_jump", "strict_priority", "priority", "allowed_worker_ids"),
        "routing_constraints",
    },
}
_STRUCTURES = ("json", "regex", "choice", "grammar")
_GUIDED = (*_STRUCTURES, "whitespace_pattern")
_BACKENDS = (None, "auto", "guidance", "llguidance")  # what may be asked to compile structured outputs
_UNSUPPORTED = (
    "multi_modal_data", "mm_processor_kwargs", "encoder_result", "prompt_embeds", "generate_request", "bootstrap_info",
)  # fmt: skip


def sampling_of(request: Request) -> dict[str, Any]:
    """Return the sampling parameters of a request, by the engine's names.

    Raises ValueError, which names the field, for one that the engine lacks.
    """
    for name in _UNSUPPORTED:
        if request.get(name):
            raise ValueError(f"{name}: not supported; send text")
    sampling: dict[str, Any] = {"max_tokens": None}  # as many as there is room for, unless the request has a limit
    for group, names in _FIELDS.items():
        for name, value in (request.get(group) or {}).items():
            if value is None or name in _FOR_OTHERS[group]:
                continue
            if name not in names:
                raise ValueError(f"{group}.{name}={value!r}: not supported")
            sampling[names[name]] = value
    stop_conditions = request.get("stop_conditions") or {}
    stop_ids = [token for name in _STOP_TOKEN_IDS for token in stop_conditions.get(name) or ()]
    if stop_ids and not stop_conditions.get("ignore_eos"):
        sampling["stop_token_ids"] = list(dict.fromkeys(stop_ids))
    # Dynamo's priorities are higher for what is more urgent.
    if priority := (request.get("routing") or {}).get("priority"):
        sampling["priority"] = -priority
    if guided := (request.get("sampling_options") or {}).get("guided_decoding"):
        sampling["structured_outputs"] = _structured_outputs(guided)
    return sampling


def is_probe(request: Request) -> bool:
    """Return whether this is a request of Dynamo's health check."""
    return request.get(_PROBE) is True


def probe_request(token: int) -> Chunk:
    """Return a request for Dynamo's health check, which generates one token."""
    return {
        "token_ids": [token],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        _PROBE: True,
    }


def _structured_outputs(guided: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in guided.items() if value is not None}
    if (backend := given.pop("backend", None)) not in _BACKENDS:
        raise ValueError(f"guided_decoding.backend={backend!r}: must be auto or guidance")
    if unknown := next((name for name in given if name not in _GUIDED), None):
        raise ValueError(f"guided_decoding.{unknown}: not supported; use one of {', '.join(_STRUCTURES)}")
    return given


class Chunks:
    """Converts the deltas of one request to chunks."""

    def __init__(self, num_samples: int, num_top_logprobs: int | None) -> None:
        self._num_samples = num_samples
        self._num_top = num_top_logprobs
        self._ended: Chunk | None = None
        self._num_ended = 0
        self.are_mixed = False  # whether chunks of several samples have been made

    def add(self, delta: Delta) -> Chunk | None:
        """Return the chunk of a delta. None for the last one of the request, which `last` returns."""
        chunk: Chunk = {"index": delta.index, "token_ids": list(delta.token_ids or ())}
        self.are_mixed = self._num_samples > 1
        if delta.logprobs is not None and self._num_top is not None:
            chunk |= _logprobs(delta.logprobs, self._num_top)
        if delta.prompt_logprobs is not None:
            by_id = [entries and _by_id(entries) for entries in delta.prompt_logprobs]
            chunk["engine_data"] = {"prompt_logprobs": by_id}
        if delta.finish_reason:
            chunk["finish_reason"] = "length" if delta.finish_reason == "timeout" else delta.finish_reason
            self._num_ended += 1
            if self._num_ended == self._num_samples:
                self._ended = chunk
                return None
        return chunk

    def last(self, completion: Completion) -> Chunk | None:
        """Return the last chunk, which has the usage of the request. None if it has ended early."""
        if self._ended is not None:
            self._ended["completion_usage"] = usage(completion)
        return self._ended


def usage(completion: Completion) -> dict[str, Any]:
    """Return the usage of a request in OpenAI's form."""
    generated = sum(sample.num_output_tokens for sample in (completion, *completion.others))
    return {
        "prompt_tokens": completion.num_input_tokens,
        "completion_tokens": generated,
        "total_tokens": completion.num_input_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": (completion.receipt or {}).get("cached_tokens", 0)},
    }


def _logprobs(tokens: Sequence[Logprobs], num_top: int) -> Chunk:
    """Return the log probabilities of a chunk. The engine lists the chosen token first, and then the most likely."""
    top = [
        [
            {"rank": entry.rank, "token_id": entry.token_id, "token": entry.decoded_token, "logprob": entry.logprob}
            for entry in sorted(set(entries), key=lambda entry: entry.rank)[:num_top]
        ]
        for entries in tokens
    ]
    chunk: Chunk = {"log_probs": [entries[0].logprob for entries in tokens]}
    return chunk | {"top_logprobs": top} if num_top else chunk


def _by_id(entries: Logprobs) -> dict[str, Any]:
    return {
        str(entry.token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
        for entry in entries
    }


def embedding_inputs(request: Request) -> list[Any]:
    """Return the inputs of an embedding request: texts, or lists of token ids. Raises ValueError."""
    given = request.get("input")
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        return [given]
    if isinstance(given, list) and given:
        return given
    raise ValueError(f"input={given!r}: must be text, a list of token ids, or a list of those")


def embedding_answer(model: str, vectors: Sequence[Sequence[float]], num_tokens: int) -> Chunk:
    """Return the answer to an embedding request. Vectors are base64 of float32, which the frontend decodes."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": to_base64(vector),
        }
        for index, vector in enumerate(vectors)
    ]
    counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": counts}


def _has(*texts: str) -> Callable[[str], bool]:
    return lambda template: all(text in template for text in texts)


# Dynamo's parsers of tool calls and of reasoning, and what the chat templates of their models have. The first applies.
TOOL_CALL_PARSERS = (
    ("harmony", _has("<|channel|>")),
    ("deepseek_v3_1", _has("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "</think>")),
    ("deepseek_v3", _has("<｜tool▁call▁begin｜>")),
    ("kimi_k2", _has("<|tool_call_begin|>")),
    ("minimax_m2", _has("<minimax:tool_call>")),
    ("glm47", _has("<arg_key>")),
    ("qwen3_coder", _has("<function=")),
    ("hermes", _has("<tool_call>")),
    ("mistral", _has("[TOOL_CALLS]")),
    ("nemotron_deci", _has("<TOOLCALL>")),
    ("phi4", _has("functools")),
    ("llama3_json", _has("<|python_tag|>")),
    ("llama3_json", _has('{"name": function name, "parameters":')),
)
REASONING_PARSERS = (
    ("gpt_oss", _has("<|channel|>")),
    ("mistral", _has("[THINK]")),
    ("kimi", _has("◁think▷")),
    ("minimax_append_think", _has("<minimax:tool_call>", "<think>")),
    ("glm45", _has("<arg_key>", "</think>")),
    ("granite", _has("Here is my thought process:")),
    ("qwen3", _has("enable_thinking", "</think>")),
    ("deepseek_r1", _has("</think>")),
)


def parser_for(template: str | None, parsers: Sequence[tuple[str, Callable[[str], bool]]]) -> str | None:
    """Return the name of the parser for models with this chat template; None if it marks nothing that is known."""
    return next((name for name, fits in parsers if template and fits(template)), None)
