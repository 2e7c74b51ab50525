"""Pairwise combinations of test parameters: every pair of values occurs in `make test`, every combination nightly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

nightly = False  # whether this run includes nightly tests; set before test modules are imported


def includes_nightly(expression: str) -> bool:
    """Return whether the expression of `pytest -m` may select nightly tests."""
    return expression != "not nightly"  # that of pyproject.toml


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """Return parameters with a value of each axis, in which every two values of different axes occur together.

    The other combinations follow in a nightly run, marked as nightly.
    """
    values = [list(axis) for axis in axes]
    combinations = list(itertools.product(*(range(len(axis)) for axis in values)))
    missing = {pair for each in combinations for pair in _pairs(each)}
    chosen = dict[tuple[int, ...], None]()
    while missing:
        best = max(combinations, key=lambda each: len(missing & _pairs(each)))
        missing -= _pairs(best)
        chosen[best] = None

    def parameter(each: Sequence[int], *marks: pytest.MarkDecorator) -> Any:
        return pytest.param(*(axis[index] for axis, index in zip(values, each, strict=True)), marks=marks)

    rest = [each for each in combinations if each not in chosen] if nightly else []
    return [*(parameter(each) for each in chosen), *(parameter(each, pytest.mark.nightly) for each in rest)]


def _pairs(combination: Sequence[int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(combination), 2))


def mostly_nightly(values: Iterable[Any], *, default: Iterable[Any]) -> list[Any]:
    """Return parameters, tuples if there are several names, of which all but the default ones are nightly."""
    kept = list(default)

    def parameter(value: Any) -> Any:
        parts = value if isinstance(value, tuple) else (value,)
        return pytest.param(*parts, marks=() if value in kept else pytest.mark.nightly)

    return [parameter(value) for value in values if nightly or value in kept]
