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
    {"quantization": "int8", "tensor_parallel_size": 2},
    {"quantization_group_size": 32},
    {"enable_lora": True, "tensor_parallel_size": 2},
    {"speculative_model": "m"},
    {"disk_cache_dir": "d", "enable_prefix_caching": False},
    {"disk_cache_dir": "d", "tensor_parallel_size": 2},
)


@pytest.mark.parametrize(("rule", "options"), list(zip(RULES, VIOLATIONS, strict=True)))
def test_every_rule_rejects_its_combination_by_name(rule, options):
    text = rejection(**options)
    assert text.startswith(f"{rule.option}=")
    assert all(name in text for name in options)
