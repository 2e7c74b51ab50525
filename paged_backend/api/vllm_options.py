"""vLLM engine arguments that this engine does not have, and the values that are accepted for them.

A value is accepted if the engine behaves that way anyway: vLLM's default if that has no effect, or a value that
describes what this engine does. Every other value is rejected, because the engine would silently ignore it. Options
that both engines have, under the same name, are fields of EngineConfig.

Names and defaults are those of `vllm/engine/arg_utils.py` and `vllm/config/`, from vLLM 0.6 on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from paged_backend.api.options import parse_string


class UnsupportedOption(NamedTuple):
    """An option of vLLM that exists here only for values without effect."""

    accepted: tuple[Any, ...]  # accepted values besides null
    reason: str  # why other values are rejected, and what to set instead


_OFF = (False,)
_EITHER = (False, True)
_EMPTY: tuple[Any, ...] = ("", {}, [])

# Descriptions of what the engine does, with the options decided by it: {option: accepted values}.
_GROUPS: tuple[tuple[str, dict[str, tuple[Any, ...]]], ...] = (
    (
        "requests are not logged; leave it out",
        {"disable_log_requests": _EITHER, "enable_log_requests": _OFF, "max_log_len": ()},
    ),
    (
        "the metrics are those of docs/reference/metrics.md; leave it out",
        {
            "aggregate_engine_logging": _OFF,
            "show_hidden_metrics_for_version": (),
            "kv_cache_metrics": _OFF,
            "kv_cache_metrics_sample": (0.01,),
            "cudagraph_metrics": _OFF,
            "enable_mfu_metrics": _OFF,
        },
    ),
    (
        "a trace has one level of detail, and profiles are written by tools; leave it out",
        {
            "collect_detailed_traces": _EMPTY,
            "enable_layerwise_nvtx_tracing": _OFF,
            "ray_workers_use_nsight": _OFF,
            "profiler_config": _EMPTY,
        },
    ),
    (
        "weights are safetensors or GGUF files, which transformers reads one after the other; leave it out",
        {
            "max_parallel_loading_workers": (),
            "use_tqdm_on_load": (True,),
            "ignore_patterns": ("original/**/*", ["original/**/*"], []),
            "safetensors_load_strategy": ("lazy",),
            "pt_load_map_location": ("cpu",),
            "model_loader_extra_config": _EMPTY,
            "weight_transfer_config": _EMPTY,
            "qlora_adapter_name_or_path": _EMPTY,
        },
    ),
    (
        "long prompts are tokenized in a separate process; set tokenize_timeout for its time limit",
        {"tokenizer_pool_size": (0,), "tokenizer_pool_type": ("ray",), "tokenizer_pool_extra_config": _EMPTY},
    ),
    (
        "the engine chooses which CUDA graphs it captures; set enforce_eager to capture none",
        {
            "max_seq_len_to_capture": (8192,),
            "max_context_len_to_capture": (8192,),
            "cuda_graph_sizes": ([],),
            "cudagraph_capture_sizes": ([],),
            "max_cudagraph_capture_size": (),
        },
    ),
    (
        "layers run fused kernels of this engine, which torch.compile does not speed up; leave it out",
        {"compilation_config": (0, {}), "optimization_level": (2,)},
    ),
    (
        "attention runs on this engine's own kernels, with cascade attention for shared prefixes; leave it out",
        {"attention_backend": ("auto",), "attention_config": _EMPTY, "disable_cascade_attn": _OFF},
    ),
    (
        "layers keep the keys and values that their attention can see, in one pool; leave it out",
        {
            "disable_hybrid_kv_cache_manager": _EITHER,
            "disable_sliding_window": _OFF,
            "use_v2_block_manager": _EITHER,
            "kv_sharing_fast_prefill": _OFF,
        },
    ),
    (
        "cached blocks are found by comparing their tokens, not by a hash alone; leave it out",
        {"prefix_caching_hash_algo": ("builtin", "sha256")},
    ),
    (
        "keys and values of 8 bits have a scale per token and head, which needs no calibration; leave it out",
        {"calculate_kv_scales": _OFF},
    ),
    (
        "set swap_space for host memory, disk_cache_dir for a disk",
        {
            "kv_offloading_size": (0,),
            "kv_offloading_backend": ("native",),
        },
    ),
    ("set remote_cache_url, and the sampling parameter prefill_only", {"kv_transfer_config": _EMPTY}),
    ("weights stay on the device; leave it out", {"cpu_offload_gb": (0,)}),
    ("`paged sleep` and `paged wake` need no option; leave it out", {"enable_sleep_mode": _EITHER}),
    (
        "prefill is always chunked; set max_num_batched_tokens and target_step_ms",
        {
            "enable_chunked_prefill": (True,),
            "max_num_partial_prefills": (1,),
            "max_long_partial_prefills": (1,),
            "long_prefill_token_threshold": (0,),
        },
    ),
    (
        "requests are admitted by priority, then in order of arrival; set fair_tenants for fairness between tenants",
        {"scheduling_policy": ("fcfs", "priority"), "scheduler_delay_factor": (0,), "scheduler_cls": _EMPTY},
    ),
    (
        "the engine schedules one step at a time; set async_scheduling to overlap scheduling and computation",
        {
            "num_scheduler_steps": (1,),
            "multi_step_stream_outputs": _EITHER,
            "num_lookahead_slots": (0,),
            "disable_async_output_proc": _OFF,
            "stream_interval": (1,),
        },
    ),
    (
        "images, audio and video are not supported",
        {
            "limit_mm_per_prompt": ({}, {"image": 0}, {"image": 0, "video": 0}, {"image": 0, "video": 0, "audio": 0}),
            "mm_processor_kwargs": _EMPTY,
            "mm_processor_cache_gb": (0, 4),
            "mm_processor_cache_type": ("lru",),
            "mm_shm_cache_max_object_size_mb": (128,),
            "mm_encoder_tp_mode": ("weights",),
            "mm_encoder_attn_backend": (),
            "disable_mm_preprocessor_cache": _EITHER,
            "disable_chunked_mm_input": _OFF,
            "enable_multimodal_encoder_data_parallel": _OFF,
            "enable_mm_embeds": _OFF,
            "media_io_kwargs": _EMPTY,
            "allowed_local_media_path": _EMPTY,
            "allowed_media_domains": _EMPTY,
            "interleave_mm_strings": _OFF,
            "skip_mm_profiling": _EITHER,
            "video_pruning_rate": (0,),
        },
    ),
    (
        "a model generates text and embeddings, or classifies if its files have a head for it; leave it out",
        {
            "runner": ("auto", "generate", "pooling"),
            "convert": ("auto", "none", "embed", "classify"),
            "task": ("auto", "generate", "embed", "embedding", "classify", "score"),
            "pooler_config": _EMPTY,
            "override_pooler_config": _EMPTY,
        },
    ),
    (
        "models, configurations and tokenizers are those of transformers; edit the model's files to change them",
        {
            "config_format": ("auto", "hf"),
            "model_impl": ("auto", "transformers"),
            "tokenizer_mode": ("auto", "hf"),
            "skip_tokenizer_init": _OFF,
            "hf_config_path": _EMPTY,
            "hf_overrides": _EMPTY,
            "rope_scaling": _EMPTY,
            "rope_theta": _EMPTY,
            "override_attention_dtype": _EMPTY,
            "override_neuron_config": _EMPTY,
        },
    ),
    ("code comes with the model, at its `revision`", {"code_revision": ()}),
    ("set it in the environment, as HF_TOKEN", {"hf_token": ()}),
    (
        "set tensor_parallel_size, pipeline_parallel_size or data_parallel_size to use several GPUs, and nnodes for"
        " several machines",
        {
            "distributed_executor_backend": ("mp", "uni"),
            "worker_use_ray": _OFF,
            "engine_use_ray": _OFF,
            "worker_cls": ("auto",),
            "worker_extension_cls": _EMPTY,
            "data_parallel_size_local": (1,),
            "data_parallel_hybrid_lb": _OFF,
            "data_parallel_external_lb": _OFF,
            "prefill_context_parallel_size": (1,),
            "decode_context_parallel_size": (1,),
            "node_rank": (0,),
            "enable_dbo": _OFF,
            "disable_custom_all_reduce": _EITHER,
        },
    ),
    (
        "the experts of a mixture are computed like every other layer; leave it out",
        {
            "enable_expert_parallel": _OFF,
            "enable_eplb": _OFF,
            "eplb_config": _EMPTY,
            "all2all_backend": ("allgather_reducescatter",),
        },
    ),
    (
        "structured outputs are compiled by llguidance; set structured_outputs_timeout or disable_any_whitespace",
        {
            "guided_decoding_backend": ("auto", "guidance"),
            "guided_decoding_disable_fallback": _OFF,
            "guided_decoding_disable_any_whitespace": _OFF,
            "guided_decoding_disable_additional_properties": _OFF,
            "structured_outputs_config": _EMPTY,
        },
    ),
    (
        "log probabilities are the model's own, before temperature and penalties",
        {"logprobs_mode": ("raw_logprobs",), "disable_logprobs_during_spec_decoding": _OFF},
    ),
    (
        "set num_speculative_tokens, speculative_model, prompt_lookup_min and prompt_lookup_max",
        {"speculative_config": _EMPTY},
    ),
    (
        "adapters are LoRA matrices of linear layers in the data type of the weights; leave it out",
        {
            "lora_dtype": ("auto",),
            "lora_extra_vocab_size": (0, 256),
            "enable_lora_bias": _OFF,
            "fully_sharded_loras": _OFF,
            "long_lora_scaling_factors": _EMPTY,
            "default_mm_loras": _EMPTY,
            "enable_prompt_adapter": _OFF,
        },
    ),
    (
        "reasoning and tool calls are part of the text; `paged openai` parses tool calls",
        {
            "enable_reasoning": _OFF,
            "reasoning_parser": _EMPTY,
            "reasoning_parser_plugin": _EMPTY,
            "tool_call_parser": _EMPTY,
        },
    ),
    (
        "prompts are text or token ids, and plugins are not supported; leave it out",
        {
            "enable_prompt_embeds": _OFF,
            "tokens_only": _OFF,
            "io_processor_plugin": _EMPTY,
            "logits_processors": _EMPTY,
            "logits_processor_pattern": _EMPTY,
            "additional_config": _EMPTY,
        },
    ),
)
UNSUPPORTED: Mapping[str, UnsupportedOption] = {
    name: UnsupportedOption(accepted, reason) for reason, options in _GROUPS for name, accepted in options.items()
}

_WHITESPACE = "disable_any_whitespace"
_SPECULATIVE = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


def check(name: str, value: Any) -> str | None:
    """Return what the value of an option in UNSUPPORTED must be, and why; None for an accepted value."""
    option = UNSUPPORTED[name]
    if value is None or any(_equal(parse_string(value), one) for one in option.accepted):
        return None
    values = " or ".join(json.dumps(one) for one in [*option.accepted, None] if one not in _EMPTY)
    return f"must be {values}: {option.reason}"


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace vLLM's nested options by equivalent options of this engine.

    A nested option without an equivalent, or that repeats another option, is kept and will be rejected.
    """
    return _translate_whitespace(_translate_speculation(options))


def _translate_whitespace(options: dict[str, Any]) -> dict[str, Any]:
    config = options.get("structured_outputs_config")
    backends = (*UNSUPPORTED["guided_decoding_backend"].accepted, None)
    if isinstance(config, dict) and config.keys() <= {"backend", _WHITESPACE} and config.get("backend") in backends:
        name, value = "structured_outputs_config", config.get(_WHITESPACE, False)
    else:
        name = f"guided_decoding_{_WHITESPACE}"
        value = parse_string(options.get(name))
    if name not in options or not isinstance(value, bool) or _WHITESPACE in options:
        return options
    return {other: one for other, one in options.items() if other != name} | {_WHITESPACE: value}


def _translate_speculation(options: Mapping[str, Any]) -> dict[str, Any]:
    config = options.get("speculative_config")
    if not isinstance(config, dict) or config.get("method", "ngram") not in ("ngram", "draft_model"):
        return dict(options)
    names = {"model": "speculative_model", **{name: name for name in _SPECULATIVE}}
    if config.keys() - names.keys() - {"method"} or options.keys() & {names.get(name) for name in config}:
        return dict(options)
    translated = {ours: config[theirs] for theirs, ours in names.items() if theirs in config}
    return {name: value for name, value in options.items() if name != "speculative_config"} | translated


def _equal(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)
