"""Rotary embedding and KV write: Triton in the interpreter or on a GPU, PyTorch and C++ on a CPU."""

import pytest
import torch
from torch.testing import assert_close

from paged_kernels import ops
from paged_kernels.cpu import native
from paged_kernels.cpu.pytorch import rope_kv_write as rope_kv_write_cpu
from paged_kernels.kv_write import kv_write_reference, rope_kv_write, rope_kv_write_reference
from paged_kernels.layer_cache import FORMATS
from tests.support.attention_cases import make_cache
from tests.support.layer_cases import TOLERANCES, implementations, name, normal
from tests.support.pairwise import pairwise

ROTATIONS = implementations(on_cpu=rope_kv_write_cpu, compiled=native.rope_kv_write, triton=rope_kv_write)
# num_heads, num_kv_heads, head_dim, block_size
SHAPES = [(1, 1, 2, 4), (9, 3, 64, 16), (18, 2, 80, 8)]


def rotation(num_heads, num_kv_heads, head_dim, block_size, *, dtype, device, format, norm, joint):
    """Make arguments of `rope_kv_write`: seven tokens, two of them without a slot.

    joint: query, key and value are slices of one row, as from a fused projection, and the pools slices of one tensor.
    """
    sizes = [num_heads, num_kv_heads, num_kv_heads]
    heads = list(normal(7, sum(sizes), head_dim, dtype=dtype, device=device).split(sizes, dim=1))
    if not joint:
        heads = [part.contiguous() for part in heads]
    angles = torch.outer(torch.arange(7.0) + 3, 2.0 ** -torch.arange(head_dim // 2).clamp(max=20)).repeat(1, 2)
    cos, sin = (turn.to(device, dtype) for turn in (angles.cos(), angles.sin()))
    pool = torch.zeros((16, 2, num_kv_heads, block_size, head_dim), dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(16 * block_size, generator=generator)[:7].index_fill(0, torch.tensor([2, 6]), -1).to(device)
    weights = [1 + normal(head_dim, dtype=dtype, device=device, seed=seed) / 4 for seed in (2, 3)]
    named = dict(query_weight=weights[0], key_weight=weights[1], eps=1e-2) if norm else {}
    return (*heads, cos, sin, make_cache(pool, format, strided=joint), slots), named


@pytest.mark.parametrize(
    ("shape", "case", "format", "norm", "joint"),
    pairwise(SHAPES, ROTATIONS, [None, *FORMATS.values()], [False, True], [False, True]),
    ids=name,
)
def test_rope_kv_write(shape, case, format, norm, joint, device):
    implementation, where, dtype = case
    options = dict(dtype=dtype, device=where or device, format=format, norm=norm, joint=joint)
    (actual, named), (expected, _) = rotation(*shape, **options), rotation(*shape, **options)
    query, wanted = implementation(*actual, **named), rope_kv_write_reference(*expected, **named)
    assert_close(query, wanted, **TOLERANCES[dtype])
    cache, right = actual[5], expected[5]
    assert right.keys.float().any()
    if implementation is not rope_kv_write_cpu and not norm:  # a block has the same bits from every implementation
        assert torch.equal(query, wanted)
        assert all(torch.equal(one, other) for one, other in zip(cache.tensors, right.tensors, strict=True))
    if format is None:
        assert_close(cache.keys, right.keys, **TOLERANCES[dtype])
        assert torch.equal(cache.values, right.values)
    else:  # the nearest code, or the next one after different rounding
        assert_close(cache.key_scales, right.key_scales, **TOLERANCES[dtype])
        read = [c.keys.float() * c.key_scales[..., None] for c in (cache, right)]
        assert_close(*read, rtol=0.13, atol=2 * float(right.key_scales.max()))
        assert torch.equal(cache.values.float(), right.values.float())
        assert torch.equal(cache.value_scales, right.value_scales)


@pytest.mark.parametrize("format", [None, *FORMATS.values()])
def test_rope_kv_write_and_kv_write_store_the_same_bits(format, device):
    """With angles of 0 nothing is rotated, and both writes must store the same bits."""
    options = dict(dtype=torch.float32, device=device, format=format, norm=False, joint=True)
    (one, _), (other, _) = (rotation(9, 3, 64, 16, **options) for _ in range(2))
    query, key, value, cos, sin, cache, slots = one
    turned = rope_kv_write(query, key, value, torch.ones_like(cos), torch.zeros_like(sin), cache, slots)
    kv_write_reference(other[1], other[2], other[5], slots)
    assert torch.equal(turned, query)
    assert all(torch.equal(*pair) for pair in zip(cache.tensors, other[5].tensors, strict=True))


def test_rotation_matches_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    options = dict(dtype=torch.float32, device="cpu", format=None, norm=False, joint=True)
    arguments, _ = rotation(9, 3, 64, 16, **options)
    query, key, _, cos, sin, cache, slots = arguments
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
    found = ops.rope_kv_write(*arguments)
    assert_close(found, expected[0][0].transpose(0, 1), **TOLERANCES[torch.float32])
    keys = cache.keys.transpose(1, 2).reshape(-1, 3, 64)[slots[slots >= 0]]
    assert_close(keys, expected[1][0].transpose(0, 1)[slots >= 0], **TOLERANCES[torch.float32])


@pytest.mark.parametrize("level", native.levels())
def test_angles_may_have_higher_precision_than_the_model(level):
    options = dict(dtype=torch.bfloat16, device="cpu", format=None, norm=False, joint=True)
    (one, _), (other, _) = (rotation(9, 3, 64, 16, **options) for _ in range(2))
    cos, sin = (torch.randn(7, 64, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
    found = native.rope_kv_write(*one[:3], cos, sin, *one[5:], level=level)
    assert torch.equal(found, rope_kv_write_reference(*other[:3], cos, sin, *other[5:]))
    assert all(map(torch.equal, one[5].tensors, other[5].tensors))


def test_odd_head_dim_is_rejected():
    arguments, _ = rotation(2, 1, 2, 4, dtype=torch.float32, device="cpu", format=None, norm=False, joint=False)
    odd = [x[..., :1] for x in arguments[:5]]
    cache = make_cache(torch.zeros((16, 2, 1, 4, 1)), None, strided=False)
    with pytest.raises(ValueError, match="head_dim=1: must be even"):
        ops.rope_kv_write(*odd, cache, arguments[6])
