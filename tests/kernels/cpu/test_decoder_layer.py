"""A decoder layer in one call against its operations in sequence."""

from dataclasses import replace

import pytest
import torch

from paged_kernels.cpu import native
from paged_kernels.cpu.native import DecoderLayer, add_rms_norm, kv_write, linear, pack_linear, paged_attention, swiglu
from paged_kernels.layer_cache import FORMATS
from tests.support.attention_cases import Case, make_inputs

pytestmark = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")

HIDDEN, INNER, KV_HEADS, GROUP, HEAD_DIM = 70, 45, 2, 3, 32
HEADS = KV_HEADS * GROUP
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def made(*, dtype, biased, head_norms, rotates, codes, **settings):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    def packed(outputs, inputs):
        if not codes:
            return pack_linear(normal(outputs, inputs))
        whole = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        return pack_linear(whole, torch.rand(outputs, generator=generator) / 64)

    def bias(outputs):
        return normal(outputs) if biased else None

    return DecoderLayer(
        norm=normal(HIDDEN), eps=1e-5, qkv=packed(QKV, HIDDEN), qkv_bias=bias(QKV), num_heads=HEADS, rotates=rotates,
        query_norm=normal(HEAD_DIM) if head_norms else None, key_norm=normal(HEAD_DIM) if head_norms else None,
        head_eps=1e-3, scale=HEAD_DIM**-0.5, sliding_window=settings.get("sliding_window"),
        softcap=settings.get("softcap"), o=packed(HIDDEN, HEADS * HEAD_DIM), o_bias=bias(HIDDEN),
        post_norm=normal(HIDDEN), post_eps=1e-2, gate_up=packed(2 * INNER, HIDDEN), gate_up_bias=bias(2 * INNER),
        down=packed(HIDDEN, INNER), down_bias=bias(HIDDEN),
    )  # fmt: skip


def run_operations(layer, output, residual, cos, sin, cache, paging, level):
    normed, total = add_rms_norm(output, residual, layer.norm, layer.eps, level=level)
    heads = linear(normed, layer.qkv, layer.qkv_bias, level=level).view(len(output), -1, HEAD_DIM)
    query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    if layer.rotates:
        norms = dict(query_weight=layer.query_norm, key_weight=layer.key_norm, eps=layer.head_eps)
        query = native.rope_kv_write(query, key, value, cos[0], sin[0], cache, paging.slots, **norms, level=level)
    else:
        kv_write(key, value, cache, paging.slots, level=level)
    asked = dict(scale=layer.scale, sliding_window=layer.sliding_window, softcap=layer.softcap)
    attended = paged_attention(query, cache, paging, **asked, level=level).flatten(1)
    normed, total = add_rms_norm(
        linear(attended, layer.o, layer.o_bias, level=level), total, layer.post_norm, layer.post_eps, level=level
    )
    inner = swiglu(linear(normed, layer.gate_up, layer.gate_up_bias, level=level), level=level)
    return linear(inner, layer.down, layer.down_bias, level=level), total


KINDS = {
    "plain": {},
    "biases and head norms": {"biased": True, "head_norms": True},
    "no rotation": {"rotates": False, "sliding_window": 5},
    "codes, soft-capped": {"codes": True, "softcap": 3.0},
}
PLAIN = {"biased": False, "head_norms": False, "rotates": True, "codes": False}


@pytest.mark.parametrize("batch", ["decode", "mixed", "padded"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("format", [None, *FORMATS.values()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", native.levels())
def test_decoder_layer_matches_its_operations_bit_for_bit(level, kind, dtype, format, first, batch):
    layer = made(dtype=dtype, **PLAIN | KINDS[kind])
    case = Case(batch, num_kv_heads=KV_HEADS, group=GROUP, head_dim=HEAD_DIM, format=format)
    (_, cache, paging), other = (make_inputs(case, dtype).arrays, make_inputs(case, dtype).arrays[1])
    tokens = len(paging.slots)
    output, residual = torch.randn(2, tokens, HIDDEN).to(dtype)
    angles = torch.randn(tokens, HEAD_DIM)
    stream = output, None if first else residual, angles.cos().to(dtype)[None], angles.sin().to(dtype)[None]
    found = layer.bind(level=level)(*stream, cache, paging)
    expected = run_operations(layer, *stream, other, paging, level)
    used = torch.arange(tokens) < paging.query_starts[-1]
    for one, another in zip(found, expected, strict=True):
        assert torch.equal(one[used], another[used])
    for one, another in zip(cache.tensors, other.tensors, strict=True):
        assert torch.equal(one.nan_to_num(7.0), another.nan_to_num(7.0))


def test_angles_of_different_types_are_rejected():
    layer = made(dtype=torch.float32, **PLAIN)
    _, cache, paging = make_inputs(Case("decode", group=GROUP, head_dim=HEAD_DIM), torch.float32).arrays
    rows = torch.randn(len(paging.slots), HIDDEN)
    angles = torch.randn(1, len(paging.slots), HEAD_DIM)
    with pytest.raises(RuntimeError, match="cos and sin have different types"):
        layer.bind()(rows, None, angles, angles.bfloat16(), cache, paging)


def test_time_of_each_operation_is_counted():
    layer = made(dtype=torch.float32, **PLAIN)
    _, cache, paging = make_inputs(Case("decode", group=GROUP, head_dim=HEAD_DIM), torch.float32).arrays
    angles = torch.randn(1, len(paging.slots), HEAD_DIM)
    before = native.seconds()
    layer.bind()(torch.randn(len(paging.slots), HIDDEN), None, angles, angles, cache, replace(paging))
    assert all(after > before[kind] for kind, after in native.seconds().items())
