"""Engine arguments of vLLM in the model directories of Triton's vLLM backend."""

import json
import logging
from dataclasses import fields

import pytest

from paged_backend.api import vllm_options
from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError

SAMPLE = {"model": "m", "disable_log_requests": True, "gpu_memory_utilization": 0.5, "enforce_eager": True}


def read(**options):
    return EngineConfig.from_options({"model": "m"} | options)


def rejection(**options):
    with pytest.raises(ConfigError) as caught:
        read(**options)
    return str(caught.value)


# A value of each option that asks for something that this engine does not do.
REJECTED = {
    "additional_config": {"a": 1},
    "aggregate_engine_logging": True,
    "all2all_backend": "deepep_low_latency",
    "allowed_local_media_path": "/media",
    "allowed_media_domains": ["example.org"],
    "attention_backend": "FLASHINFER",
    "attention_config": {"backend": "FLASH_ATTN"},
    "calculate_kv_scales": True,
    "code_revision": "v2",
    "collect_detailed_traces": "model",
    "compilation_config": 3,
    "config_format": "mistral",
    "convert": "reward",
    "cpu_offload_gb": 4,
    "cuda_graph_sizes": [1, 2],
    "cudagraph_capture_sizes": [1, 2],
    "cudagraph_metrics": True,
    "data_parallel_external_lb": True,
    "data_parallel_hybrid_lb": True,
    "data_parallel_size_local": 2,
    "decode_context_parallel_size": 2,
    "default_mm_loras": {"image": "adapter"},
    "disable_async_output_proc": True,
    "disable_cascade_attn": True,
    "disable_chunked_mm_input": True,
    "disable_custom_all_reduce": "sometimes",
    "disable_hybrid_kv_cache_manager": "sometimes",
    "disable_log_requests": "sometimes",
    "disable_logprobs_during_spec_decoding": True,
    "disable_mm_preprocessor_cache": "sometimes",
    "disable_sliding_window": True,
    "distributed_executor_backend": "ray",
    "enable_chunked_prefill": False,
    "enable_dbo": True,
    "enable_eplb": True,
    "enable_expert_parallel": True,
    "enable_layerwise_nvtx_tracing": True,
    "enable_log_requests": True,
    "enable_lora_bias": True,
    "enable_mfu_metrics": True,
    "enable_mm_embeds": True,
    "enable_multimodal_encoder_data_parallel": True,
    "enable_prompt_adapter": True,
    "enable_prompt_embeds": True,
    "enable_reasoning": True,
    "enable_sleep_mode": "sometimes",
    "engine_use_ray": True,
    "eplb_config": {"window_size": 10},
    "fully_sharded_loras": True,
    "guided_decoding_backend": "outlines",
    "guided_decoding_disable_additional_properties": True,
    "guided_decoding_disable_any_whitespace": "sometimes",
    "guided_decoding_disable_fallback": True,
    "hf_config_path": "/models/config",
    "hf_overrides": {"num_hidden_layers": 2},
    "hf_token": "hf_abc",
    "ignore_patterns": ["*.bin"],
    "interleave_mm_strings": True,
    "io_processor_plugin": "plugin",
    "kv_cache_metrics": True,
    "kv_cache_metrics_sample": 0.5,
    "kv_offloading_backend": "lmcache",
    "kv_offloading_size": 8,
    "kv_sharing_fast_prefill": True,
    "kv_transfer_config": {"kv_connector": "NixlConnector"},
    "limit_mm_per_prompt": {"image": 2},
    "logits_processor_pattern": ".*",
    "logits_processors": ["module.Processor"],
    "logprobs_mode": "processed_logprobs",
    "long_lora_scaling_factors": [2.0],
    "long_prefill_token_threshold": 512,
    "lora_dtype": "float16",
    "lora_extra_vocab_size": 512,
    "max_context_len_to_capture": 1024,
    "max_cudagraph_capture_size": 64,
    "max_log_len": 100,
    "max_long_partial_prefills": 2,
    "max_num_partial_prefills": 2,
    "max_parallel_loading_workers": 2,
    "max_seq_len_to_capture": 1024,
    "media_io_kwargs": {"video": {"num_frames": 40}},
    "mm_encoder_attn_backend": "FLASH_ATTN",
    "mm_encoder_tp_mode": "data",
    "mm_processor_cache_gb": 8,
    "mm_processor_cache_type": "shm",
    "mm_processor_kwargs": {"num_crops": 4},
    "mm_shm_cache_max_object_size_mb": 256,
    "model_impl": "vllm",
    "model_loader_extra_config": {"concurrency": 8},
    "multi_step_stream_outputs": "sometimes",
    "node_rank": 1,
    "num_lookahead_slots": 4,
    "num_scheduler_steps": 8,
    "optimization_level": 0,
    "override_attention_dtype": "float16",
    "override_neuron_config": {"a": 1},
    "override_pooler_config": {"pooling_type": "MEAN"},
    "pooler_config": {"pooling_type": "MEAN"},
    "prefill_context_parallel_size": 2,
    "prefix_caching_hash_algo": "xxhash",
    "profiler_config": {"profiler": "torch"},
    "pt_load_map_location": "cuda",
    "qlora_adapter_name_or_path": "adapter",
    "ray_workers_use_nsight": True,
    "reasoning_parser": "deepseek_r1",
    "reasoning_parser_plugin": "parser.py",
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    "rope_theta": 10000,
    "runner": "draft",
    "safetensors_load_strategy": "eager",
    "scheduler_cls": "module.Scheduler",
    "scheduler_delay_factor": 0.5,
    "scheduling_policy": "lifo",
    "show_hidden_metrics_for_version": "0.7",
    "skip_mm_profiling": "sometimes",
    "skip_tokenizer_init": True,
    "speculative_config": {"method": "eagle", "model": "m"},
    "stream_interval": 10,
    "structured_outputs_config": {"backend": "outlines"},
    "task": "reward",
    "tokenizer_mode": "mistral",
    "tokenizer_pool_extra_config": {"a": 1},
    "tokenizer_pool_size": 4,
    "tokenizer_pool_type": "thread",
    "tokens_only": True,
    "tool_call_parser": "hermes",
    "use_tqdm_on_load": False,
    "use_v2_block_manager": "sometimes",
    "video_pruning_rate": 0.5,
    "weight_transfer_config": {"backend": "nccl"},
    "worker_cls": "module.Worker",
    "worker_extension_cls": "module.Extension",
    "worker_use_ray": True,
}


def test_model_json_of_the_vllm_backend_samples(caplog):
    caplog.set_level(logging.INFO)
    config = EngineConfig.from_options(SAMPLE | {"disable_log_stats": False, "tensor_parallel_size": "1"})
    assert (config.gpu_memory_utilization, config.enforce_eager, config.disable_log_stats) == (0.5, True, False)
    assert "ignoring vLLM options that change nothing here: disable_log_requests" in caplog.text


def test_unsupported_options_are_not_options_of_this_engine():
    assert not {spec.name for spec in fields(EngineConfig)} & vllm_options.UNSUPPORTED.keys()


def test_every_unsupported_option_has_a_rejected_value():
    assert REJECTED.keys() == vllm_options.UNSUPPORTED.keys()


@pytest.mark.parametrize("name", vllm_options.UNSUPPORTED)
def test_accepted_values_change_nothing(name):
    plain = read()
    for value in (*vllm_options.UNSUPPORTED[name].accepted, None):
        assert read(**{name: value}) == plain


@pytest.mark.parametrize("name", vllm_options.UNSUPPORTED)
def test_other_values_are_rejected_with_name_value_and_reason(name):
    reason = vllm_options.UNSUPPORTED[name].reason
    assert reason
    for value in ("else", REJECTED[name]):
        text = rejection(**{name: value})
        assert text.startswith(f"{name}={json.dumps(value)}: must be ") and text.endswith(reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_chunked_prefill": False}, "must be true or null: prefill is always chunked"),
        ({"enable_chunked_prefill": "false"}, "must be true or null: prefill is always chunked"),
        (
            {"data_parallel_size_local": 2},
            "must be 1 or null: set tensor_parallel_size, pipeline_parallel_size or data",
        ),
        ({"data_parallel_size_local": True}, "must be 1 or null"),
        ({"distributed_executor_backend": "ray"}, 'must be "mp" or "uni" or null'),
        ({"cpu_offload_gb": 4}, "must be 0 or null: weights stay on the device; leave it out"),
        (
            {"tokenizer_mode": "mistral"},
            'must be "auto" or "hf" or null: models, configurations and tokenizers are those of transformers',
        ),
        ({"quantization": "awq"}, 'must be "int8"'),
        ({"load_format": "pt"}, 'must be "auto"'),
        ({"kv_cache_dtype": "fp8_e5m2"}, 'must be "auto" or "fp8"'),
        ({"structured_outputs_config": {"disable_any_whitespace": True, "disable_fallback": True}}, "must be null"),
    ],
)
def test_rejections_say_what_is_possible(options, reason):
    ((name, value),) = options.items()
    assert rejection(**options).startswith(f"{name}={json.dumps(value)}: {reason}")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"enforce_eager": "true"}, {"enforce_eager": True}),
        ({"enforce_eager": "False"}, {"enforce_eager": False}),
        ({"max_num_seqs": "8"}, {"max_num_seqs": 8}),
        ({"gpu_memory_utilization": "0.5"}, {"gpu_memory_utilization": 0.5}),
        ({"tokenizer": "8"}, {"tokenizer": "8"}),
        ({"enable_prefix_caching": None, "swap_space": None}, {"enable_prefix_caching": True, "swap_space": None}),
        ({"max_num_seqs": 1024}, {"max_num_seqs": 1024, "max_num_batched_tokens": 1024}),
        ({"max_num_seqs": 8}, {"max_num_seqs": 8, "max_num_batched_tokens": 512}),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}},
            {"num_speculative_tokens": 3, "prompt_lookup_max": 5, "speculative_model": None},
        ),
        (
            {"structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True}},
            {"disable_any_whitespace": True},
        ),
        ({"structured_outputs_config": {"backend": "guidance"}}, {"disable_any_whitespace": False}),
        ({"guided_decoding_disable_any_whitespace": "true"}, {"disable_any_whitespace": True}),
        (
            {"speculative_config": {"model": "d", "num_speculative_tokens": 3}},
            {"num_speculative_tokens": 3, "speculative_model": "d"},
        ),
    ],
)
def test_spellings_of_values_in_vllm_model_files(written, meant):
    config = read(**written)
    assert {name: getattr(config, name) for name in meant} == meant


@pytest.mark.parametrize("more", [{"method": "eagle"}, {"draft_tensor_parallel_size": 2}])
def test_other_speculation_methods_are_rejected(more):
    config = {"model": "d", "num_speculative_tokens": 3} | more
    assert rejection(speculative_config=config).startswith('speculative_config={"model": "d"')


def test_speculation_set_by_two_options_is_rejected():
    config = {"model": "d", "num_speculative_tokens": 3}
    assert rejection(speculative_config=config, num_speculative_tokens=4).startswith("speculative_config=")


def test_an_unknown_name_is_rejected_with_the_closest_known_one():
    assert "invalid_attribute: unknown engine option" in rejection(invalid_attribute=True)
    assert rejection(disable_log_request=True).endswith("did you mean disable_log_requests?")
