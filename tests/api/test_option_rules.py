"""Rules between engine options."""

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.option_rules import RULES


def rejection(**options):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options({"model": "m"} | options)
    return str(caught.value)


def test_max_num_batched_tokens_must_be_at_least_max_num_seqs():
    assert "max_num_batched_tokens=8: must be at least max_num_seqs=16" in rejection(
        max_num_batched_tokens=8, max_num_seqs=16
    )


def test_options_that_exclude_each_other_are_rejected():
    said = rejection(async_scheduling=True, num_speculative_tokens=4)
    assert "async_scheduling=true: cannot be combined with num_speculative_tokens=4" in said
    said = rejection(quantization="int8", tensor_parallel_size=2)
    assert 'quantization="int8": not supported with tensor_parallel_size=2; leave one of them out' in said


VIOLATIONS = (
    {"max_num_batched_tokens": 8, "max_num_seqs": 16},
    {"prompt_lookup_min": 3, "prompt_lookup_max": 2},
    {"max_cpu_loras": 1, "max_loras": 2},
    {"async_scheduling": True, "num_speculative_tokens": 4},
    {"async_scheduling": True, "pipeline_parallel_size": 2},
    {"speculative_model": "m", "pipeline_parallel_size": 2},
    {"quantization": "int8", "tensor_parallel_size": 2},
    {"quantization_group_size": 32},
    {"data_parallel_size": 2, "nnodes": 2},
    {"data_parallel_size": 2, "disk_cache_dir": "d"},
    {"data_parallel_size": 2, "kv_events_config": {"enable_kv_cache_events": True}},
    {"batch_invariant": True, "tensor_parallel_size": 2},
    {"max_state_checkpoints": 4, "enable_prefix_caching": False},
    {"enable_lora": True, "tensor_parallel_size": 2},
    {"enable_lora": True, "pipeline_parallel_size": 2},
    {"speculative_model": "m"},
    {"disk_cache_dir": "d", "enable_prefix_caching": False},
    {"disk_cache_dir": "d", "tensor_parallel_size": 2},
    {"disk_cache_dir": "d", "pipeline_parallel_size": 2},
    {"remote_cache_url": "redis://h", "enable_prefix_caching": False},
    {"remote_cache_url": "redis://h", "tensor_parallel_size": 2},
    {"remote_cache_url": "redis://h", "pipeline_parallel_size": 2},
)


@pytest.mark.parametrize(("rule", "options"), list(zip(RULES, VIOLATIONS, strict=True)))
def test_every_rule_rejects_its_combination_by_name(rule, options):
    text = rejection(**options)
    assert text.startswith(f"{rule.option}=")
    assert all(name in text for name in options)


def test_errors_and_representations_show_no_password():
    url = "rediss://user:p@ss@word/@host:6379/x"
    text = rejection(remote_cache_url=url)
    assert text.startswith('remote_cache_url="rediss://***@host:6379/x": must be a URL like')
    url = "redis://user:password@host"
    text = rejection(remote_cache_url=url, enable_prefix_caching=False)
    assert "password" not in text
    assert "user" not in text
    assert "password" not in repr(EngineConfig(model="m", remote_cache_url=url))
