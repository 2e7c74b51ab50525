"""vLLM's engine arguments, as the model directories of Triton's vLLM backend have them."""

import json
import logging
from dataclasses import fields

import pytest

from paged_backend.api import vllm_options
from paged_backend.api.config import ConfigError, EngineConfig

SAMPLE = {"model": "m", "disable_log_requests": True, "gpu_memory_utilization": 0.5, "enforce_eager": True}


def read(**options):
    return EngineConfig.from_options({"model": "m"} | options)


def refusal(**options):
    with pytest.raises(ConfigError) as caught:
        read(**options)
    return str(caught.value)


def test_the_model_json_of_its_samples_is_read(caplog):
    caplog.set_level(logging.INFO)
    config = EngineConfig.from_options(SAMPLE | {"disable_log_stats": False, "tensor_parallel_size": "1"})
    assert (config.gpu_memory_utilization, config.enforce_eager, config.disable_log_stats) == (0.5, True, False)
    assert "disable_log_requests: vLLM's, and nothing to this engine" in caplog.text


def test_no_argument_is_told_of_twice():
    assert not {spec.name for spec in fields(EngineConfig)} & vllm_options.ARGUMENTS.keys()


@pytest.mark.parametrize("name", vllm_options.ARGUMENTS)
def test_what_asks_for_nothing_else_is_accepted_and_the_rest_refused_with_the_reason(name):
    argument = vllm_options.ARGUMENTS[name]
    for value in ("anything",) if argument.accepted is None else argument.accepted:
        read(**{name: value})
    if argument.accepted is not None:
        assert argument.reason
        text = refusal(**{name: "else"})
        assert text.startswith(f'{name}="else": must be ') and text.endswith(argument.reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_chunked_prefill": False}, "must be true or null: long prompts are always read in chunks"),
        ({"enable_chunked_prefill": "false"}, "must be true or null: long prompts are always read in chunks"),
        ({"pipeline_parallel_size": 2}, "must be 1 or null: GPUs share a model by tensor_parallel_size"),
        ({"pipeline_parallel_size": True}, "must be 1 or null"),
        ({"distributed_executor_backend": "ray"}, 'must be "mp" or "uni" or null'),
        ({"cpu_offload_gb": 4}, "must be 0 or null: there is no such thing here; leave it out"),
        ({"tokenizer_mode": "mistral"}, 'must be "auto" or "hf" or null: tokenizers are those of transformers'),
        ({"quantization": "awq"}, 'must be "int8"'),
        ({"load_format": "pt"}, 'must be "auto"'),
        ({"kv_cache_dtype": "fp8_e5m2"}, 'must be "auto" or "fp8"'),
        ({"structured_outputs_config": {"disable_any_whitespace": True, "disable_fallback": True}}, "must be null"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name_value_and_reason(options, reason):
    ((name, value),) = options.items()
    assert refusal(**options).startswith(f"{name}={json.dumps(value)}: {reason}")


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
            {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
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
def test_values_as_vllm_and_its_users_write_them(written, meant):
    config = read(**written)
    assert {name: getattr(config, name) for name in meant} == meant


@pytest.mark.parametrize("more", [{"method": "eagle"}, {"draft_tensor_parallel_size": 2}])
def test_guesses_of_another_kind_are_refused(more):
    config = {"model": "d", "num_speculative_tokens": 3} | more
    assert refusal(speculative_config=config).startswith('speculative_config={"model": "d"')


def test_guesses_that_two_options_tell_of_are_refused():
    config = {"model": "d", "num_speculative_tokens": 3}
    assert refusal(speculative_config=config, num_speculative_tokens=4).startswith("speculative_config=")


def test_an_unknown_name_is_refused_with_the_nearest_of_vllms_and_ours():
    assert "invalid_attribute: unknown engine option" in refusal(invalid_attribute=True)
    assert refusal(disable_log_request=True).endswith("did you mean disable_log_requests?")
