"""Names of other engines for options and sampling parameters."""

import json
import logging
from dataclasses import fields

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError, RequestError
from paged_backend.api.other_engines import UNSUPPORTED_PARAMETERS, VLLM_OPTIONS, replacement, suggestion
from paged_backend.api.sampling_params import SamplingParams
from tests.support.sampling_params import LIMITS

SAMPLE = {"model": "m", "disable_log_requests": True, "gpu_memory_utilization": 0.5, "enforce_eager": True}


def read(**options):
    return EngineConfig.from_options({"model": "m"} | options)


def rejection(**options):
    with pytest.raises(ConfigError) as caught:
        read(**options)
    return str(caught.value)


# A value of each option that asks for something that this engine does not do.
REJECTED = {
    "allowed_local_media_path": "/media",
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
    "data_parallel_size_local": 2,
    "decode_context_parallel_size": 2,
    "disable_async_output_proc": True,
    "disable_cascade_attn": True,
    "disable_custom_all_reduce": "sometimes",
    "disable_hybrid_kv_cache_manager": "sometimes",
    "disable_log_requests": "sometimes",
    "disable_mm_preprocessor_cache": "sometimes",
    "disable_sliding_window": True,
    "distributed_executor_backend": "ray",
    "enable_chunked_prefill": False,
    "enable_eplb": True,
    "enable_expert_parallel": True,
    "enable_log_requests": True,
    "enable_lora_bias": True,
    "enable_prompt_adapter": True,
    "enable_prompt_embeds": True,
    "enable_reasoning": True,
    "enable_sleep_mode": "sometimes",
    "fully_sharded_loras": True,
    "guided_decoding_backend": "outlines",
    "guided_decoding_disable_additional_properties": True,
    "guided_decoding_disable_any_whitespace": "sometimes",
    "guided_decoding_disable_fallback": True,
    "hf_config_path": "/models/config",
    "hf_overrides": {"num_hidden_layers": 2},
    "hf_token": "hf_abc",
    "ignore_patterns": ["*.bin"],
    "kv_offloading_backend": "lmcache",
    "kv_offloading_size": 8,
    "kv_transfer_config": {"kv_connector": "NixlConnector"},
    "limit_mm_per_prompt": {"image": 2},
    "logits_processor_pattern": ".*",
    "logits_processors": ["module.Processor"],
    "logprobs_mode": "processed_logprobs",
    "long_prefill_token_threshold": 512,
    "lora_dtype": "float16",
    "lora_extra_vocab_size": 512,
    "max_cudagraph_capture_size": 64,
    "max_log_len": 100,
    "max_long_partial_prefills": 2,
    "max_num_partial_prefills": 2,
    "max_parallel_loading_workers": 2,
    "max_seq_len_to_capture": 1024,
    "mm_processor_cache_gb": 8,
    "mm_processor_kwargs": {"num_crops": 4},
    "model_impl": "vllm",
    "model_loader_extra_config": {"concurrency": 8},
    "multi_step_stream_outputs": "sometimes",
    "node_rank": 1,
    "num_scheduler_steps": 8,
    "override_pooler_config": {"pooling_type": "MEAN"},
    "pooler_config": {"pooling_type": "MEAN"},
    "prefix_caching_hash_algo": "xxhash",
    "qlora_adapter_name_or_path": "adapter",
    "reasoning_parser": "deepseek_r1",
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    "rope_theta": 10000,
    "runner": "draft",
    "scheduling_policy": "lifo",
    "skip_tokenizer_init": True,
    "speculative_config": {"method": "eagle", "model": "m"},
    "stream_interval": 10,
    "structured_outputs_config": {"backend": "outlines"},
    "task": "reward",
    "tokenizer_mode": "mistral",
    "tool_call_parser": "hermes",
    "use_tqdm_on_load": False,
    "use_v2_block_manager": "sometimes",
    "worker_use_ray": True,
}


def test_model_json_of_the_vllm_backend_samples(caplog, tmp_path):
    caplog.set_level(logging.WARNING)
    path = tmp_path / "model.json"
    path.write_text(json.dumps(SAMPLE | {"disable_log_stats": False, "tensor_parallel_size": "1"}))
    config = EngineConfig.from_file(path)
    assert (config.gpu_memory_utilization, config.enforce_eager, config.disable_log_stats) == (0.5, True, False)
    (record,) = caplog.records
    assert record.getMessage() == "ignoring vLLM options that change nothing here: disable_log_requests"


def test_names_of_vllm_are_not_options_of_this_engine():
    assert not {spec.name for spec in fields(EngineConfig)} & VLLM_OPTIONS.keys()


def test_every_option_of_vllm_has_a_rejected_value():
    assert REJECTED.keys() == VLLM_OPTIONS.keys()


@pytest.mark.parametrize("name", VLLM_OPTIONS)
def test_accepted_values_change_nothing(name):
    plain = read()
    for value in (*VLLM_OPTIONS[name].accepted, None):
        assert read(**{name: value}) == plain


@pytest.mark.parametrize("name", VLLM_OPTIONS)
def test_other_values_are_rejected_with_name_value_and_reason(name):
    reason = VLLM_OPTIONS[name].reason
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
        ({"enable_prefix_caching": None, "swap_space": None}, {"enable_prefix_caching": True, "swap_space": None}),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}},
            {"num_speculative_tokens": 3, "prompt_lookup_max": 5, "speculative_model": None},
        ),
        (
            {"structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True}},
            {"disable_any_whitespace": True},
        ),
        ({"structured_outputs_config": {"backend": "guidance"}}, {"disable_any_whitespace": False}),
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
    assert rejection(speculative_config={"method": "ngram"}).startswith("speculative_config=")  # no number of tokens


def test_speculation_set_by_two_options_is_rejected():
    config = {"model": "d", "num_speculative_tokens": 3}
    assert rejection(speculative_config=config, num_speculative_tokens=4).startswith("speculative_config=")


def test_an_unknown_name_is_rejected_with_the_closest_known_one():
    assert "invalid_attribute: unknown engine option" in rejection(invalid_attribute=True)
    assert rejection(disable_log_request=True).endswith("did you mean disable_log_requests?")


NAMES = {spec.name for spec in fields(SamplingParams)}


def test_unsupported_parameters_are_rejected_with_a_replacement():
    for name, parameter in UNSUPPORTED_PARAMETERS.items():
        for value in (*parameter.accepted, None):
            assert SamplingParams.parse({name: value}, LIMITS) == SamplingParams()
    with pytest.raises(RequestError, match="use_beam_search=true: not supported; use beam_width instead"):
        SamplingParams.parse({"use_beam_search": True}, LIMITS)
    with pytest.raises(RequestError, match="detokenize=false: not supported; leave it out"):
        SamplingParams.parse({"detokenize": False}, LIMITS)


def test_names_of_parameters():
    assert replacement("response_format") == "json_schema or json_object"
    assert suggestion("guided_json", NAMES) == "use json_schema instead"
    assert suggestion("guided_json", {"guided_jsn"}) == "did you mean guided_jsn?", "a name that is known here"
    assert suggestion("temprature", NAMES) == "did you mean temperature?"
    assert suggestion("frobnicate", NAMES) is None
