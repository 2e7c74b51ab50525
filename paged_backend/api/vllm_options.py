"""vLLM's engine arguments that this engine has no option of: which values of each a `model.json` may have all the same.

Those that are options here, under the same names, are in config.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Argument(NamedTuple):
    accepted: tuple[Any, ...] | None  # values that ask for nothing else than is done anyway; None: all do
    reason: str  # why another is refused


_NO_SUCH = "there is no such thing here; leave it out"
_OFF = (False, None)
_NOTHING = (None, "", {}, [])
_GUIDED = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer", None)


def _each(names: str, accepted: tuple[Any, ...] | None, reason: str = "") -> dict[str, Argument]:
    return {name: Argument(accepted, reason) for name in names.split()}


ARGUMENTS: Mapping[str, Argument] = {
    # Names, logs, ways of loading and of laying out the work: no answer depends on them.
    **_each(
        "served_model_name disable_log_requests enable_log_requests max_log_len aggregate_engine_logging"
        " show_hidden_metrics_for_version kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics"
        " max_parallel_loading_workers use_tqdm_on_load ignore_patterns safetensors_load_strategy pt_load_map_location"
        " tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config"
        " max_seq_len_to_capture max_context_len_to_capture cuda_graph_sizes cudagraph_capture_sizes"
        " max_cudagraph_capture_size compilation_config optimization_level"
        " disable_custom_all_reduce all2all_backend disable_async_output_proc use_v2_block_manager num_lookahead_slots"
        " num_scheduler_steps multi_step_stream_outputs scheduler_delay_factor disable_hybrid_kv_cache_manager"
        " disable_cascade_attn attention_backend attention_config prefix_caching_hash_algo",
        None,
    ),
    # Images are not taken, so nothing that is said of them matters.
    **_each(
        "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_encoder_tp_mode"
        " mm_encoder_attn_backend mm_shm_cache_max_object_size_mb disable_mm_preprocessor_cache media_io_kwargs"
        " allowed_local_media_path allowed_media_domains interleave_mm_strings skip_mm_profiling video_pruning_rate"
        " disable_chunked_mm_input enable_multimodal_encoder_data_parallel",
        None,
    ),
    # Defaults of vLLM's own OpenAI server for sampling parameters; Triton's vLLM backend does not read them either.
    **_each("generation_config", None),
    **_each("override_generation_config", _NOTHING, "give sampling parameters with each request"),
    **_each("runner", ("auto", "generate", "pooling", None), _NO_SUCH),
    **_each("convert", ("auto", "none", "embed", None), _NO_SUCH),
    **_each("task", ("auto", "generate", "embed", "embedding", None), "a model generates, and embeds; leave it out"),
    **_each("config_format", ("auto", "hf", None), "models are read as Hugging Face has them"),
    **_each("model_impl", ("auto", "transformers", None), "models are those of transformers"),
    **_each("tokenizer_mode", ("auto", "hf", None), "tokenizers are those of transformers"),
    **_each("enable_chunked_prefill", (True, None), "long prompts are always read in chunks"),
    **_each("scheduling_policy", ("fcfs", "priority", None), "requests go by priority, then first come, first served"),
    **_each("stream_interval", (1, None), "what is there is sent"),
    **_each("distributed_executor_backend", ("mp", "uni", None), "processes are this machine's; leave it out"),
    **_each("guided_decoding_backend", _GUIDED, _NO_SUCH),
    **_each("logprobs_mode", ("raw_logprobs", None), "log probabilities are the model's own, before temperature"),
    **_each("code_revision", (None,), "code comes with the model, of its `revision`"),
    **_each("hf_token", (None,), "give it in the environment, as HF_TOKEN"),
    **_each(
        "pipeline_parallel_size data_parallel_size data_parallel_size_local prefill_context_parallel_size"
        " decode_context_parallel_size nnodes",
        (1, None),
        "GPUs share a model by tensor_parallel_size; for more of it, run more instances",
    ),
    **_each("max_num_partial_prefills max_long_partial_prefills", (1, None), _NO_SUCH),
    **_each("long_prefill_token_threshold cpu_offload_gb kv_offloading_size node_rank", (0, None), _NO_SUCH),
    **_each("lora_dtype", ("auto", None), "adapters have the type of the weights"),
    **_each("worker_cls", ("auto", None), _NO_SUCH),
    **_each(
        "worker_use_ray engine_use_ray ray_workers_use_nsight enable_expert_parallel enable_dbo enable_eplb"
        " skip_tokenizer_init enable_prompt_embeds disable_sliding_window enable_lora_bias fully_sharded_loras"
        " enable_prompt_adapter enable_sleep_mode calculate_kv_scales kv_sharing_fast_prefill enable_reasoning"
        " enable_mm_embeds guided_decoding_disable_fallback guided_decoding_disable_any_whitespace"
        " guided_decoding_disable_additional_properties data_parallel_hybrid_lb data_parallel_external_lb"
        " disable_logprobs_during_spec_decoding enable_layerwise_nvtx_tracing tokens_only",
        _OFF,
        _NO_SUCH,
    ),
    **_each(
        "hf_config_path rope_scaling rope_theta hf_overrides override_neuron_config override_pooler_config"
        " pooler_config override_attention_dtype model_loader_extra_config additional_config worker_extension_cls"
        " scheduler_cls tool_call_parser chat_template"
        " logits_processor_pattern logits_processors structured_outputs_config reasoning_parser reasoning_parser_plugin"
        " otlp_traces_endpoint collect_detailed_traces kv_transfer_config kv_events_config kv_offloading_backend"
        " speculative_config qlora_adapter_name_or_path default_mm_loras long_lora_scaling_factors eplb_config"
        " io_processor_plugin profiler_config weight_transfer_config",
        _NOTHING,
        _NO_SUCH,
    ),
}
_WHITESPACE = "disable_any_whitespace"
_SPECULATIVE = {
    "model": "speculative_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_min": "prompt_lookup_min",
    "prompt_lookup_max": "prompt_lookup_max",
}


def refusal(name: str, value: Any) -> str | None:
    """Why a value of one of ARGUMENTS cannot be had; None where it asks for nothing else than is done anyway."""
    argument = ARGUMENTS[name]
    if argument.accepted is None or any(_same(plain(value), one) for one in argument.accepted):
        return None
    return f"{_listed(argument.accepted)}: {argument.reason}"


def plain(value: Any) -> Any:
    """A value that is written as a string, as model directories of Triton's have it: "true", "2", "0.5"."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return json.loads(value) if value[:1].isdecimal() else value
    except ValueError:
        return value


def unfold(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with those of vLLM's that hold others taken apart into what says the same here. One that says more, or
    what another option says too, is left as it is."""
    return _unfold_whitespace(_unfold_speculation(options))


def _unfold_whitespace(options: dict[str, Any]) -> dict[str, Any]:
    config = options.get("structured_outputs_config")
    if isinstance(config, dict) and config.keys() <= {"backend", _WHITESPACE} and config.get("backend") in _GUIDED:
        name, value = "structured_outputs_config", config.get(_WHITESPACE, False)
    else:
        name = f"guided_decoding_{_WHITESPACE}"
        value = plain(options.get(name))
    if name not in options or not isinstance(value, bool) or _WHITESPACE in options:
        return options
    return {one: said for one, said in options.items() if one != name} | {_WHITESPACE: value}


def _unfold_speculation(options: Mapping[str, Any]) -> dict[str, Any]:
    config = options.get("speculative_config")
    if not isinstance(config, dict) or config.get("method", "ngram") not in ("ngram", "draft_model"):
        return dict(options)
    if config.keys() - _SPECULATIVE.keys() - {"method"} or options.keys() & {_SPECULATIVE.get(name) for name in config}:
        return dict(options)
    told = {ours: config[theirs] for theirs, ours in _SPECULATIVE.items() if theirs in config}
    return {name: value for name, value in options.items() if name != "speculative_config"} | told


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _listed(values: Iterable[Any]) -> str:
    return "must be " + " or ".join(json.dumps(value) for value in values)
