"""The tensors of tensorrtllm_backend's models, and how each is handled here.

A client's tensors have a batch dimension before these dims, except for `llmapi`, the model over TensorRT-LLM's LLM API.
`ensemble` and `tensorrt_llm_bls` take text, `tensorrt_llm` takes token ids. Where release 0.19 renamed a tensor, both
names are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

ENSEMBLE, BLS, CORE, LLMAPI = "ensemble", "tensorrt_llm_bls", "tensorrt_llm", "llmapi"
MAX_BATCH_SIZE = 64

Neutral = Callable[[np.ndarray], bool]  # whether a value has no effect


class Input(NamedTuple):
    """An input tensor.

    A row of it becomes the engine's sampling parameter `parameter`. If `unsupported` is set, it is rejected unless
    that function finds its value neutral. With neither, requests.py or llmapi.py reads it.
    """

    data_type: str
    dims: tuple[int, ...]
    parameter: str | None = None
    unsupported: Neutral | None = None
    required: bool = False


def _empty(value: np.ndarray) -> bool:
    return value.size == 0 or (value.dtype == np.object_ and not any(value.reshape(-1)))


def _zero(value: np.ndarray) -> bool:
    return not np.any(value)


def _only(number: float) -> Neutral:
    return lambda value: bool(np.all(value == number))


def _is_single(value: np.ndarray) -> bool:
    return value.size <= 1


def _is_hf(value: np.ndarray) -> bool:
    return all(text in (b"", b"hf") for text in value.reshape(-1))


def _anything(value: np.ndarray) -> bool:
    return True


_INT, _FLOAT, _BOOL, _STRING, _LONG = "TYPE_INT32", "TYPE_FP32", "TYPE_BOOL", "TYPE_STRING", "TYPE_UINT64"

_COMMON_INPUTS = {
    "num_return_sequences": Input(_INT, (1,)),
    "beam_width": Input(_INT, (1,)),
    "end_id": Input(_INT, (1,)),
    "pad_id": Input(_INT, (1,)),
    "temperature": Input(_FLOAT, (1,), "temperature"),
    "repetition_penalty": Input(_FLOAT, (1,), "repetition_penalty"),
    "presence_penalty": Input(_FLOAT, (1,), "presence_penalty"),
    "frequency_penalty": Input(_FLOAT, (1,), "frequency_penalty"),
    "min_tokens": Input(_INT, (1,), "min_tokens"),
    "min_length": Input(_INT, (1,), "min_tokens"),
    "seed": Input(_LONG, (1,), "seed"),
    "random_seed": Input(_LONG, (1,), "seed"),
    "exclude_input_in_output": Input(_BOOL, (1,)),
    "return_log_probs": Input(_BOOL, (1,)),
    "return_perf_metrics": Input(_BOOL, (1,)),
    "return_num_input_tokens": Input(_BOOL, (1,)),
    "return_num_output_tokens": Input(_BOOL, (1,)),
    "guided_decoding_guide_type": Input(_STRING, (1,)),
    "guided_decoding_guide": Input(_STRING, (1,)),
    "lora_task_id": Input(_LONG, (1,), "lora_name"),
    "lora_weights": Input("TYPE_FP16", (-1, -1), unsupported=_empty),
    "lora_config": Input(_INT, (-1, 3), unsupported=_empty),
    "return_context_logits": Input(_BOOL, (1,), unsupported=_zero),
    "return_generation_logits": Input(_BOOL, (1,), unsupported=_zero),
    "prompt_embedding_table": Input("TYPE_FP16", (-1, -1), unsupported=_empty),
    "prompt_vocab_size": Input(_INT, (1,), unsupported=_zero),
}

TEXT_INPUTS = {
    "text_input": Input(_STRING, (1,), required=True),
    "max_tokens": Input(_INT, (1,), "max_tokens", required=True),
    "stream": Input(_BOOL, (1,)),
    "bad_words": Input(_STRING, (-1,), "bad_words"),
    "stop_words": Input(_STRING, (-1,), "stop"),
    "top_k": Input(_INT, (1,), "top_k"),
    "top_p": Input(_FLOAT, (1,), "top_p"),
    "length_penalty": Input(_FLOAT, (1,), "length_penalty"),
    "embedding_bias_words": Input(_STRING, (-1,)),
    "embedding_bias_weights": Input(_FLOAT, (-1,)),
    **_COMMON_INPUTS,
    "decoder_text_input": Input(_STRING, (1,), unsupported=_empty),
    "prompt_table_extra_id": Input(_LONG, (1,), unsupported=_zero),
}

BLS_INPUTS = {
    **TEXT_INPUTS,
    "image_input": Input("TYPE_FP16", (-1, 3, -1, -1), unsupported=_empty),
    "image_bytes_input": Input("TYPE_UINT8", (-1, -1, -1, -1), unsupported=_empty),
    "image_url_input": Input(_STRING, (1,), unsupported=_empty),
    "video_bytes_input": Input("TYPE_UINT8", (-1, -1, -1, -1), unsupported=_empty),
    "num_draft_tokens": Input(_INT, (1,), unsupported=_zero),
    "use_draft_logits": Input(_BOOL, (1,), unsupported=_zero),
}

CORE_INPUTS = {
    "input_ids": Input(_INT, (-1,)),
    "input_lengths": Input(_INT, (1,), required=True),
    "request_output_len": Input(_INT, (1,), "max_tokens", required=True),
    "streaming": Input(_BOOL, (1,)),
    "stop": Input(_BOOL, (1,)),
    "stop_words_list": Input(_INT, (2, -1)),
    "bad_words_list": Input(_INT, (2, -1)),
    "embedding_bias": Input(_FLOAT, (-1,)),
    "runtime_top_k": Input(_INT, (1,), "top_k"),
    "runtime_top_p": Input(_FLOAT, (1,), "top_p"),
    "len_penalty": Input(_FLOAT, (1,), "length_penalty"),
    "early_stopping": Input(_BOOL, (1,), "early_stopping"),
    **_COMMON_INPUTS,
    "runtime_top_p_decay": Input(_FLOAT, (1,), unsupported=_only(1)),
    "runtime_top_p_min": Input(_FLOAT, (1,), unsupported=_anything),  # has no effect without a decay, like the next one
    "runtime_top_p_reset_ids": Input(_INT, (1,), unsupported=_anything),
    "beam_search_diversity_rate": Input(_FLOAT, (1,), unsupported=_zero),
    "decoder_input_ids": Input(_INT, (-1,), unsupported=_is_single),  # upstream tests send one pad token
    "decoder_input_lengths": Input(_INT, (1,), unsupported=_anything),
    "encoder_input_features": Input("TYPE_FP16", (-1, -1), unsupported=_empty),
    "encoder_output_lengths": Input(_INT, (1,), unsupported=_zero),
    "draft_input_ids": Input(_INT, (-1,), unsupported=_empty),
    "draft_logits": Input(_FLOAT, (-1, -1), unsupported=_empty),
    "draft_acceptance_threshold": Input(_FLOAT, (1,), unsupported=_zero),
    "prompt_table_extra_ids": Input(_LONG, (-1,), unsupported=_zero),
    "cross_attention_mask": Input(_BOOL, (-1, -1), unsupported=_empty),
    "skip_cross_attn_blocks": Input(_BOOL, (1,), unsupported=_zero),
    "mrope_rotary_cos_sin": Input(_FLOAT, (-1,), unsupported=_empty),
    "mrope_position_deltas": Input("TYPE_INT64", (1,), unsupported=_zero),
    "context_phase_params": Input("TYPE_UINT8", (-1,), unsupported=_empty),
    "retention_token_range_starts": Input(_INT, (-1,), unsupported=_empty),
    "retention_token_range_ends": Input(_INT, (-1,), unsupported=_empty),
    "retention_token_range_priorities": Input(_INT, (-1,), unsupported=_empty),
    "retention_token_range_durations_ms": Input(_INT, (-1,), unsupported=_empty),
    "retention_decode_priority": Input(_INT, (1,), unsupported=_empty),
    "retention_decode_duration_ms": Input(_INT, (1,), unsupported=_only(-1)),
    "lookahead_window_size": Input(_INT, (1,), unsupported=_empty),
    "lookahead_ngram_size": Input(_INT, (1,), unsupported=_empty),
    "lookahead_verification_set_size": Input(_INT, (1,), unsupported=_empty),
}

LLMAPI_INPUTS = {
    "text_input": Input(_STRING, (-1,), required=True),
    "image_url": Input(_STRING, (-1,), unsupported=_empty),
    "streaming": Input(_BOOL, (1,)),
    "sampling_param_best_of": Input(_INT, (1,), "best_of"),
    "sampling_param_temperature": Input(_FLOAT, (1,), "temperature"),
    "sampling_param_top_k": Input(_INT, (1,), "top_k"),
    "sampling_param_top_p": Input(_FLOAT, (1,), "top_p"),
    "sampling_param_frequency_penalty": Input(_FLOAT, (1,), "frequency_penalty"),
    "sampling_param_presence_penalty": Input(_FLOAT, (1,), "presence_penalty"),
    "sampling_param_max_tokens": Input(_INT, (1,), "max_tokens"),
    "sampling_param_stop": Input(_STRING, (-1,), "stop"),
    "sampling_param_seed": Input(_LONG, (1,), "seed"),
    "sampling_param_exclude_input_from_output": Input(_BOOL, (1,)),
    "sampling_param_return_perf_metrics": Input(_BOOL, (1,)),
    "sampling_param_logits_post_processor_name": Input(_STRING, (1,), unsupported=_empty),
    "return_finish_reason": Input(_BOOL, (1,)),
    "return_stop_reason": Input(_BOOL, (1,)),
    "return_cumulative_logprob": Input(_BOOL, (1,)),
    "stop": Input(_BOOL, (1,)),
    "lora_name": Input(_STRING, (1,), "lora_name"),
    "lora_id": Input(_LONG, (1,)),  # ignored, like lora_path: adapters are listed on the server, by name
    "lora_path": Input(_STRING, (1,)),
    "lora_ckpt_source": Input(_STRING, (1,), unsupported=_is_hf),
}

INPUTS = {ENSEMBLE: TEXT_INPUTS, BLS: BLS_INPUTS, CORE: CORE_INPUTS, LLMAPI: LLMAPI_INPUTS}


class Output(NamedTuple):
    """An output tensor."""

    data_type: str
    dims: tuple[int, ...]


_COMMON_OUTPUTS = {
    "cum_log_probs": Output(_FLOAT, (-1,)),
    "output_log_probs": Output(_FLOAT, (-1, -1)),
    "context_logits": Output(_FLOAT, (-1, -1)),  # never sent; declared, like the next one, for clients that name it
    "generation_logits": Output(_FLOAT, (-1, -1, -1)),
    "batch_index": Output(_INT, (1,)),
    "sequence_index": Output(_INT, (1,)),
    "num_input_tokens": Output(_INT, (1,)),
    "num_output_tokens": Output(_INT, (1,)),
    "kv_cache_alloc_new_blocks": Output(_INT, (1,)),
    "kv_cache_reused_blocks": Output(_INT, (1,)),
    "kv_cache_alloc_total_blocks": Output(_INT, (1,)),
    "arrival_time_ns": Output("TYPE_INT64", (1,)),
    "first_scheduled_time_ns": Output("TYPE_INT64", (1,)),
    "first_token_time_ns": Output("TYPE_INT64", (1,)),
    "last_token_time_ns": Output("TYPE_INT64", (1,)),
    "acceptance_rate": Output(_FLOAT, (1,)),
    "total_accepted_draft_tokens": Output(_INT, (1,)),
    "total_draft_tokens": Output(_INT, (1,)),
}
TEXT_OUTPUTS = {"text_output": Output(_STRING, (-1,)), **_COMMON_OUTPUTS}
CORE_OUTPUTS = {
    "output_ids": Output(_INT, (-1, -1)),
    "sequence_length": Output(_INT, (-1,)),
    **_COMMON_OUTPUTS,
    "context_phase_params": Output("TYPE_UINT8", (-1,)),  # never sent
}
LLMAPI_OUTPUTS = {
    "text_output": Output(_STRING, (-1,)),
    "finish_reason": Output(_STRING, (-1,)),
    "stop_reason": Output(_STRING, (-1,)),
    "cumulative_logprob": Output(_FLOAT, (-1,)),
    "kv_cache_reused_block": Output(_INT, (-1,)),
    "kv_cache_missed_block": Output(_INT, (-1,)),
    "kv_cache_alloc_new_blocks": Output(_INT, (-1,)),
    "kv_cache_alloc_total_blocks": Output(_INT, (-1,)),
    "kv_cache_hit_rate": Output(_FLOAT, (-1,)),
    "arrival_time_ns": Output("TYPE_INT64", (1,)),
    "first_scheduled_time_ns": Output("TYPE_INT64", (1,)),
    "first_token_time_ns": Output("TYPE_INT64", (1,)),
    "last_token_time_ns": Output("TYPE_INT64", (1,)),
    "acceptance_rate": Output(_FLOAT, (1,)),
    "total_accepted_draft_tokens": Output(_INT, (1,)),
    "total_draft_tokens": Output(_INT, (1,)),
}
OUTPUTS = {ENSEMBLE: TEXT_OUTPUTS, BLS: TEXT_OUTPUTS, CORE: CORE_OUTPUTS, LLMAPI: LLMAPI_OUTPUTS}

NUMPY_TYPES = {_INT: np.int32, _FLOAT: np.float32, "TYPE_INT64": np.int64, _STRING: np.object_}
