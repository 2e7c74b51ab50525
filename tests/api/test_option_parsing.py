"""Spellings of engine options: the nested option `limits`, its aliases, and options laid over others."""

from dataclasses import fields

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.limits import InputLimits
from paged_backend.api.option_parsing import merge_options


def read(**options):
    return EngineConfig.from_options({"model": "m"} | options)


def rejection(**options):
    with pytest.raises(ConfigError) as caught:
        read(**options)
    return str(caught.value)


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
        ({"limits": {"max_tool": 2}}, "limits.max_tool: unknown limit; did you mean limits.max_tools?"),
        ({"limits.max_tool": 2}, "limits.max_tool: unknown limit; did you mean limits.max_tools?"),
        ({"limits": {"zzz": 2}}, "limits.zzz: unknown limit; known limits are max_prompt_chars, min_priority, "),
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
