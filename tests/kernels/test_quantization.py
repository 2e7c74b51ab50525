"""Attention over quantized pools: where NaN goes, and the precision of fp16."""

from functools import partial

import pytest
import torch

from paged_kernels.cpu import native as compiled
from paged_kernels.cpu.paged_attention import paged_attention as attend_cpu
from paged_kernels.layer_cache import FORMATS
from paged_kernels.paged_attention import paged_attention, paged_attention_reference
from tests.support.attention_cases import Case, make_inputs

ON_CPU = [attend_cpu, *(partial(compiled.paged_attention, level=level) for level in compiled.levels())]


@pytest.mark.parametrize("format", FORMATS.values())
@pytest.mark.parametrize("attend", [paged_attention, *ON_CPU, paged_attention_reference])
def test_nan_affects_only_rows_that_attend_to_it(attend, format, device):
    place = "cpu" if attend in ON_CPU else device
    case = Case("decode", format=format)
    query, cache, paging = make_inputs(case, torch.float32, place).arrays
    clean = attend(query, cache, paging, scale=0.1)
    heads = slice(case.group, 2 * case.group)
    for pool in (cache.key_scales, cache.value_scales):
        token = pool[paging.block_tables[2, 1].long(), 1, 3:4]
        scale = token.clone()
        token.fill_(torch.nan)
        paging.plans.clear()
        spoilt = attend(query, cache, paging, scale=0.1)
        token.copy_(scale)
        assert spoilt[2, heads].isnan().all()
        spoilt[2, heads] = clean[2, heads]
        assert torch.equal(spoilt, clean)


@pytest.mark.parametrize("factor", [2.0**-14, 1.0, 2.0**12])
@pytest.mark.parametrize("format", FORMATS.values())
def test_fp16_precision_does_not_depend_on_value_scales(format, factor, device):
    """The scale of a value is folded into the fp16 weights: tiny or huge values must not cost precision."""
    query, cache, paging = make_inputs(Case("mixed", format=format), torch.float16, device).arrays
    cache.value_scales.mul_(factor)
    expected = paged_attention_reference(query.float(), cache, paging, scale=0.1)
    found = paged_attention(query, cache, paging, scale=0.1)
    assert (found.float() - expected).abs().amax() <= 2e-3 * expected.abs().amax()
