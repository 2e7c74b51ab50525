"""Sizes and counts with units, in options and limits."""

from fractions import Fraction

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.sizes import parse_quantity


def read(**options):
    return EngineConfig.from_options({"model": "m"} | options)


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
