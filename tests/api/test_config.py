"""Engine options: spellings, values, rules between options, and errors."""

import json
import pickle
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import pytest

from paged_backend.api.config import RULES, EngineConfig, KvEventsConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.limits import InputLimits, merge_options
from paged_backend.api.options import host
from paged_backend.api.sizes import parse_quantity

ROOT = Path(__file__).parents[2]


def read(**options):
    return EngineConfig.from_options({"model": "m"} | options)


def rejection(**options):
    with pytest.raises(ConfigError) as caught:
        read(**options)
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
        ("block_size", 24, 'must be "auto" or 1 or 2 or 4'),
        ("block_size", 512, 'must be "auto" or 1 or 2 or 4'),
        ("block_size", "automatic", 'must be "auto" or 1 or 2 or 4'),
        ("block_size", True, 'must be "auto" or 1 or 2 or 4'),
        ("max_model_len", 1, "at least 2"),
        ("max_model_len", "many", "whole number"),
        ("max_num_seqs", 0, "1..65536"),
        ("gpu_memory_utilization", 0, "above 0"),
        ("gpu_memory_utilization", 1.2, "at most 1"),
        ("kv_cache_memory_bytes", -5, "at least 1"),
        ("num_gpu_blocks_override", 0, "at least 1"),
        ("enable_prefix_caching", 0, "false"),
        ("kv_cache_dtype", "fp4", '"auto" or "fp8" or "fp8_e4m3" or "int8"'),
        ("kv_cache_dtype_skip_layers", [], "must be a list of numbers of layers, from 0 on"),
        ("kv_cache_dtype_skip_layers", [-1], 'or of "sliding_window", like [0, 1] or'),
        ("kv_cache_dtype_skip_layers", "0", "must be a list"),
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
    known = rejection(zzz=1).partition("known are ")[2].split(", ")
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


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("trust_remote_code", "true", True),
        ("enforce_eager", "False", False),
        ("max_num_seqs", "8", 8),
        ("max_num_seqs", 8.0, 8),
        ("first_response_ms", "-1", -1),
        ("quantization_group_size", "32", 32),
        ("block_size", "8", 8),
        ("block_size", "auto", "auto"),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("tokenizer", "8", "8"),
    ],
)
def test_values_may_be_strings(name, value, expected):
    given = {name: value} | ({"quantization": "int8"} if name == "quantization_group_size" else {})
    found = getattr(read(**given), name)
    assert found == expected and type(found) is type(expected)


def test_a_step_has_room_for_every_sequence_by_default():
    assert read().max_num_batched_tokens == read(max_num_seqs="8").max_num_batched_tokens == 512
    assert read(max_num_seqs="1024").max_num_batched_tokens == 1024


def test_configurations_are_copied_as_they_are():
    config = read(limits={"max_tools": "3"}, swap_space="1GiB", kv_events_config={"hwm": 4})
    assert replace(config) == pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("name", ["gpu-0.example.org", "10.0.0.1", "fe80::1", "::1"])
def test_addresses(name):
    assert host(name) == read(master_addr=name).master_addr == name


@pytest.mark.parametrize("name", ["gpu-0:29500", "10.0.0.1:80", "a b", ""])
def test_an_address_has_no_port(name):
    assert rejection(master_addr=name).endswith("must be a host name or an IP address, without a port")


@pytest.mark.parametrize("name", [spec.name for spec in fields(InputLimits)])
def test_every_limit_has_three_spellings(name):
    limits = InputLimits(**{name: 3})
    assert read(limits={name: 3}).limits == limits
    assert read(**{f"limits.{name}": 3}).limits == limits
    assert read(**{name: 3}).limits == limits


def test_spellings_may_be_mixed():
    config = read(limits={"max_tools": "2"}, max_messages=4, **{"limits.max_choices": "8"})
    assert config.limits == InputLimits(max_tools=2, max_messages=4, max_choices=8)


def test_null_selects_the_default():
    assert read(limits=None) == read(limits={"max_tools": None}) == read(max_tools=None) == read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": {"max_tools": 2}, "max_tools": 2}, "limits.max_tools and max_tools: both set the same limit"),
        ({"max_tools": 2, "limits": {"max_tools": 2}}, "max_tools and limits.max_tools: both set the same limit"),
        (
            {"limits.max_tools": 2, "limits": {"max_tools": 3}},
            "limits.max_tools and limits.max_tools: both set the same limit",
        ),
        ({"limits": {"max_tool": 2}}, "limits.max_tool: unknown; did you mean max_tools?"),
        ({"limits.max_tool": 2}, "limits.max_tool: unknown; did you mean max_tools?"),
        ({"limits": {"zzz": 2}}, "limits.zzz: unknown; known are max_prompt_chars, min_priority, "),
        ({"max_tool": 2}, "max_tool: unknown engine option; did you mean max_tools?"),
        ({"limits": {"max_tools": 0}}, "limits.max_tools=0: must be a whole number 1..2147483647"),
        ({"max_tools": "many"}, 'limits.max_tools="many": must be a whole number 1..2147483647'),
        ({"limits": 3}, 'limits=3: must be an object like {"max_tools": 8}'),
        ({"limits": [{"max_tools": 3}]}, 'limits=[{"max_tools": 3}]: must be an object like {"max_tools": 8}'),
    ],
)
def test_rejected_limits(options, message):
    assert rejection(**options).startswith(message)


def test_merged_options_merge_limits_one_by_one():
    base = {"model": "m", "limits": {"max_tools": 1, "max_choices": 1}}
    merged = merge_options(base, {"seed": 1, "limits.max_tools": 2, "max_messages": 2})
    assert merged == {
        "model": "m",
        "seed": 1,
        "limits": {"max_tools": 2, "max_choices": 1, "max_messages": 2},
    }
    assert merge_options({"model": "m"}, {"seed": 1}) == {"model": "m", "seed": 1}


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
    {"kv_cache_dtype_skip_layers": [0], "kv_cache_dtype": "auto"},
    {"kv_cache_dtype_skip_layers": [0], "pipeline_parallel_size": 2, "kv_cache_dtype": "int8"},
    {"block_size": 16, "kv_cache_dtype": "int4"},
    {"kv_cache_dtype": "int4", "pipeline_parallel_size": 2},
    {"data_parallel_size": 2, "nnodes": 2},
    {"nnodes": 2, "tensor_parallel_size": 3},
    {"data_parallel_size": 2, "disk_cache_dir": "d"},
    {"data_parallel_size": 2, "kv_events_config": {"enable_kv_cache_events": True}},
    {"batch_invariant": True, "tensor_parallel_size": 2},
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


@pytest.mark.parametrize("options", VIOLATIONS)
def test_every_rule_rejects_its_combination_by_name(options):
    text = rejection(**options)
    assert text.startswith(f"{next(iter(options))}=")
    assert all(name in text for name in options)


def test_every_rule_is_violated_once():
    assert len(VIOLATIONS) == len(RULES)


def test_errors_and_representations_show_no_password():
    url = "rediss://user:p@ss@word/@host:6379/x"
    text = rejection(remote_cache_url=url)
    assert text.startswith('remote_cache_url="rediss://***@host:6379/x": must be a URL like')
    url = "redis://user:password@host"
    text = rejection(remote_cache_url=url, enable_prefix_caching=False)
    assert "password" not in text
    assert "user" not in text
    assert "password" not in repr(EngineConfig(model="m", remote_cache_url=url))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512B", 512),
        ("1kB", 1000),
        ("1KB", 1000),
        ("100MB", 10**8),
        ("100mb", 10**8),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5TiB", 3 << 39),
        ("1k", 1000),
        ("1K", 1024),
        ("25.5g", 25_500_000_000),
        ("25.3G", Fraction("25.3") * 2**30),
        *((text, None) for text in ("", "5", "GiB", "2XB", "1e3MB", "-1MB", "0x1MB", "1_0MB", "\uff11MB", "1MBs")),
    ],
)
def test_sizes(text, expected):
    assert parse_quantity(text) == expected


def test_counts_have_no_units_of_bytes():
    assert parse_quantity("8k", bytes=False) == 8000
    assert parse_quantity("8kB", bytes=False) is None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("kv_cache_memory_bytes", "100MB", 10**8),
        ("kv_cache_memory_bytes", "25.3G", int(25.3 * 2**30)),
        ("kv_cache_memory_bytes", "4096", 4096),
        ("swap_space", "512MiB", 0.5),
        ("swap_space", "0GiB", 0.0),
        ("swap_space", "2.5", 2.5),
        ("disk_cache_gib", "2TiB", 2048.0),
        ("max_response_mib", "100MB", 95),
        ("max_sessions_mib", "1GiB", 1024),
        ("max_model_len", "32k", 32000),
        ("max_model_len", "32K", 32768),
        ("max_num_batched_tokens", "2K", 2048),
    ],
)
def test_options_have_units(name, value, expected):
    found = getattr(read(**{name: value}), name)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("spelling", ["max_structure_bytes", "limits.max_structure_bytes"])
def test_limits_have_units(spelling):
    assert read(**{spelling: "128KiB"}).limits.max_structure_bytes == 128 << 10


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "kv_cache_memory_bytes",
            "2XB",
            'kv_cache_memory_bytes="2XB": must be a whole number of at least 1, or with a unit like "500MB" or "2GiB"',
        ),
        ("kv_cache_memory_bytes", "0GiB", 'kv_cache_memory_bytes="0GiB": must be a whole number of at least 1'),
        ("swap_space", "-1GiB", 'swap_space="-1GiB": must be a number of at least 0, or with a unit like "500MB"'),
        ("swap_space", True, "swap_space=true: must be a number of at least 0"),
        ("max_response_mib", "500kB", 'max_response_mib="500kB": must be a whole number 1..1048576, or with a unit'),
        ("max_model_len", "8kB", 'max_model_len="8kB": must be a whole number of at least 2, or with a unit like "8k"'),
        (
            "max_salt_bytes",
            "4GiB",
            'limits.max_salt_bytes="4GiB": must be a whole number 1..2147483647, or with a unit',
        ),
        ("max_tools", "8k", 'limits.max_tools="8k": must be a whole number 1..2147483647'),
        (
            "quantization",
            "awq",
            'quantization="awq": must be "int8" or "int4"; a model whose weights are quantized needs',
        ),
        (
            "quantization",
            "fp8",
            'quantization="fp8": must be "int8" or "int4"; a model whose weights are quantized needs',
        ),
    ],
)
def test_errors_name_option_value_and_examples(name, value, message):
    with pytest.raises(ConfigError) as caught:
        read(**{name: value})
    assert str(caught.value).startswith(message)


def events(value):
    return read(kv_events_config=value).kv_events_config


def test_events_are_off_unless_they_are_enabled():
    assert not events(None).is_enabled
    assert not events({}).is_enabled
    assert not events({"enable_kv_cache_events": True, "publisher": "null"}).is_enabled
    assert events({"enable_kv_cache_events": True}).is_enabled


def test_events_are_published_on_this_machine_only_by_default():
    assert KvEventsConfig().endpoint == "tcp://127.0.0.1:5557"


def test_fields_are_those_of_vllm():
    given = {
        **{"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@a@m"},
        **{"replay_endpoint": "tcp://*:5558", "buffer_steps": 7, "hwm": 8, "max_queue_size": 9},
    }
    assert events(given) == KvEventsConfig(**given)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (3, "kv_events_config=3: must be an object"),
        ({"endpiont": "x"}, "kv_events_config.endpiont: unknown; did you mean endpoint"),
        ({"buffer_steps": 0}, "kv_events_config.buffer_steps=0: must be a whole number of at least 1"),
        ({"publisher": "kafka"}, "kv_events_config.publisher=.*must be"),
        ({"topic": 1}, "kv_events_config.topic=1: must be a string"),
    ],
)
def test_invalid_fields_of_kv_events_are_rejected_by_name(value, problem):
    with pytest.raises(ConfigError, match=problem):
        events(value)
