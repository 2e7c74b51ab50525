"""Engine options: accepted values, and the errors for rejected ones."""

import json
from pathlib import Path

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError

ROOT = Path(__file__).parents[2]


def rejection(**options):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options({"model": "m"} | options)
    return str(caught.value)


def test_model_json_of_the_repository_is_valid():
    config = EngineConfig.from_file(ROOT / "model_repository/paged_llm/1/model.json")
    assert config.block_size == 16


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("model", "", "non-empty"),
        ("model", 3, "string"),
        ("dtype", "int3", '"bfloat16"'),
        ("quantization_group_size", 48, "must be 32 or 64 or 128"),
        ("quantization", "int5", 'must be "int8" or "int4"'),
        ("device", "tpu", '"cuda"'),
        ("block_size", 24, "one of"),
        ("block_size", 512, "one of"),
        ("block_size", True, "one of"),
        ("max_model_len", 1, "at least 2"),
        ("max_model_len", "many", "whole number"),
        ("max_num_seqs", 0, "1..65536"),
        ("gpu_memory_utilization", 0, "above 0"),
        ("gpu_memory_utilization", 1.2, "at most 1"),
        ("kv_cache_memory_bytes", -5, "at least 1"),
        ("num_gpu_blocks_override", 0, "at least 1"),
        ("enable_prefix_caching", 0, "false"),
        ("kv_cache_dtype", "fp4", '"auto" or "fp8" or "fp8_e4m3" or "int8"'),
        ("swap_space", -1, "at least 0"),
        ("swap_space", "much", "must be a number"),
        ("preemption_mode", "drop", '"swap"'),
        ("load_format", "pt", '"dummy"'),
        ("seed", -1, "0.."),
        ("trust_remote_code", "yes", "true or false"),
        ("batch_invariant", 1, "true or false"),
    ],
)
def test_an_invalid_value_is_rejected_with_name_value_and_limit(name, value, limit):
    text = rejection(**{name: value})
    assert text.startswith(f"{name}={json.dumps(value)}: ")
    assert limit in text


def test_an_unknown_option_is_rejected_with_the_closest_name():
    assert rejection(max_num_seq=3) == "max_num_seq: unknown engine option; did you mean max_num_seqs?"
    known = rejection(zzz=1).partition("known options are ")[2].split(", ")
    assert {"model", "max_stop_strings"} < set(known)


@pytest.mark.parametrize(("text", "reason"), [("{", "Expecting"), ("[]", "one JSON object"), ("{}", "model: missing")])
def test_an_invalid_file_is_named(tmp_path, text, reason):
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        EngineConfig.from_file(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        EngineConfig.from_file(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"otlp_traces_endpoint": "localhost:4318"}, "must be a URL that begins with http:// or https://"),
        ({"otlp_traces_endpoint": "http://"}, "must be a URL"),
        ({"trace_sample_ratio": 1.5}, "must be a number from 0 to 1"),
        ({"trace_sample_ratio": -0.1}, "must be a number from 0 to 1"),
    ],
)
def test_invalid_trace_options_are_rejected(options, problem):
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name}=.*{problem}"):
        EngineConfig.from_options({"model": "m"} | options)
