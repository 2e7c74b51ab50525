"""Projections that take one launch for few rows, where a measurement finds that faster."""

from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

from paged_backend.models import decoder, fusion
from paged_backend.models.attention import ATTENTION, AttentionSpec
from paged_backend.models.decoder import FewRowsWeight, Norm, Projection
from paged_backend.models.few_rows import choose_max_rows, with_few_rows
from tests.support.families import COMMON

ROW_COUNTS = (1, 8, 9, 70)


@pytest.fixture
def launches(monkeypatch):
    """The numbers of rows of the calls of few_rows_linear."""
    seen, multiply = [], decoder.few_rows_linear

    def spied(x, *arguments, **options):
        seen.append(len(x))
        return multiply(x, *arguments, **options)

    monkeypatch.setattr(decoder, "few_rows_linear", spied)
    return seen


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_both_ways_compute_the_same(gated, rows, launches):
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, rows, 32, generator=generator)
    weight, norm, bias = (torch.randn(size, generator=generator) for size in ((24, 32), (32,), (24,)))
    plain = Projection(("layer",), weight, bias, Norm(norm, 1e-5), gated)
    expected = plain.add(x, residual)
    found = replace(plain, weight=FewRowsWeight(weight, 8)).add(x, residual)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    assert launches == ([rows] if rows <= 8 else [])


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_plain_projection(rows, launches):
    x, weight = torch.randn(rows, 32), torch.randn(24, 32)
    assert_close(FewRowsWeight(weight, 8)(x, None), x @ weight.T)
    assert launches == ([rows] if rows <= 8 else [])


@pytest.mark.parametrize(("faster_up_to", "expected"), [(0, 0), (1, 1), (16, 16), (20, 16), (1000, 32)])
def test_largest_number_of_rows_for_which_one_launch_is_faster(faster_up_to, expected):
    seconds = []

    def measure(calls):
        for call in calls:
            call()
        return seconds.pop()

    def run(rows, weight):
        is_fused = isinstance(weight, FewRowsWeight)
        assert not is_fused or weight.max_rows >= len(rows)
        seconds[:] = [len(rows) / max(faster_up_to, 0.1) if is_fused else 1.01]

    assert choose_max_rows([torch.zeros(4, 8)] * 3, run, measure) == expected


@pytest.mark.parametrize("faster", [True, False])
def test_fused_model_with_few_rows(faster, launches):
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**COMMON), dtype=torch.float32).eval()
    model.set_attn_implementation(ATTENTION)
    fused = fusion.fuse(model, [AttentionSpec(scale=0.25)] * COMMON["num_hidden_layers"], {})

    def measure(calls):
        return float(isinstance(calls[0].args[1], FewRowsWeight) != faster)

    found = with_few_rows(fused, measure)
    assert bool(found) == faster
    for layer in found.layers if found else ():
        assert all(isinstance(one.weight, FewRowsWeight) for one in layer.projections)
        launches.clear()
        layer.attention.qkv(torch.randn(3, COMMON["hidden_size"]))
        assert launches == [3]
