"""A decoder layer in one call against its operations in sequence."""

import dataclasses
from functools import partial

import pytest
import torch

from paged_kernels.cpu import native
from paged_kernels.cpu.native import (
    CausalModel,
    DecoderLayer,
    DecoderLayers,
    add_rms_norm,
    kv_write,
    linear,
    paged_attention,
    swiglu,
)
from paged_kernels.cpu.packed_linear import pack_linear, pack_quantized
from paged_kernels.layer_cache import FORMATS
from paged_kernels.packed_blocks import BLOCK_SIZE
from tests.support.attention_cases import Case, make_inputs, replace_paging
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")

HIDDEN, INNER, KV_HEADS, GROUP, HEAD_DIM = 70, 48, 2, 3, 32
HEADS = KV_HEADS * GROUP
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def made(*, dtype, biased, head_norms, rotates, codes, **settings):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    def packed(outputs, inputs):
        if not codes:
            return pack_linear(normal(outputs, inputs))
        bits = codes if outputs == QKV else 8
        whole = torch.randint(-8, 8, (outputs, inputs), generator=generator, dtype=torch.int8)
        scales, mins = torch.rand(2, outputs, -(-inputs // 32), generator=generator).half() / 8
        made = pack_quantized(whole, scales, mins if bits == 4 else None, 32, bits)
        return made._replace(int8_rows=outputs in (QKV, 2 * INNER))

    def bias(outputs):
        return normal(outputs) if biased else None

    return DecoderLayer(
        norm=normal(HIDDEN), eps=1e-5, qkv=packed(QKV, HIDDEN), qkv_bias=bias(QKV), num_heads=HEADS, rotates=rotates,
        query_norm=normal(HEAD_DIM) if head_norms else None, key_norm=normal(HEAD_DIM) if head_norms else None,
        head_eps=1e-3, scale=HEAD_DIM**-0.5, sliding_window=settings.get("sliding_window"),
        softcap=settings.get("softcap"), sinks=None, o=packed(HIDDEN, HEADS * HEAD_DIM), o_bias=bias(HIDDEN),
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
    "quantized, soft-capped": {"codes": 4, "softcap": 3.0},
}
PLAIN = {"biased": False, "head_norms": False, "rotates": True, "codes": None}


@pytest.mark.parametrize(
    ("level", "kind", "dtype", "format", "batch"),
    pairwise(
        native.levels(),
        KINDS,
        [torch.float32, torch.float16, torch.bfloat16],
        [None, *FORMATS.values(), "int4"],
        ["decode", "mixed", "padded"],
    ),
    ids=str,
)
def test_decoder_layers_match_their_operations_bit_for_bit(level, kind, dtype, format, batch):
    layer = made(dtype=dtype, **PLAIN | KINDS[kind])
    block_size = BLOCK_SIZE if format == "int4" else 16
    case = Case(batch, KV_HEADS, GROUP, HEAD_DIM, block_size=block_size, format=format)
    check_layers([layer, layer], *(inputs_of(case, dtype, 2) for _ in range(2)), level)


def inputs_of(case, dtype, count):
    """Return some caches of a case, and the addresses of each."""
    arrays = [make_inputs(case, dtype).arrays for _ in range(count)]
    return [cache for _, cache, _ in arrays], [arrays[0][2]] * count


def in_pages(layers, caches, pagings, **options):
    """Return layers with these caches and addresses, as a function of the rest."""
    pages = list(dict.fromkeys([*pagings, *(paging.packed for paging in pagings if paging.packed)]))
    indices = [(pages.index(paging), pages.index(paging.packed) if paging.packed else None) for paging in pagings]
    return partial(DecoderLayers(layers, caches, indices, **options), pagings=pages)


def check_layers(layers, inputs, same_inputs, level):
    """inputs, same_inputs: the same caches and addresses twice, since they are written."""
    (caches, pagings), (others, _) = inputs, same_inputs
    dtype, paging = layers[0].norm.dtype, pagings[0]
    tokens = len(paging.slots)
    stream = torch.randn(tokens, HIDDEN).to(dtype)
    angles = torch.randn(tokens, HEAD_DIM)
    cos, sin = angles.cos().to(dtype)[None], angles.sin().to(dtype)[None]
    found = in_pages(layers, caches, pagings, level=level)(stream, cos, sin)
    output, residual = stream, None
    for layer, other, addresses in zip(layers, others, pagings, strict=True):
        output, residual = run_operations(layer, output, residual, cos, sin, other, addresses, level)
    used = torch.arange(tokens) < paging.query_starts[-1]
    assert torch.equal(found[used], (output + residual)[used])
    for cache, other in zip(caches, others, strict=True):
        packed = [(), ()] if cache.packed is None else [cache.packed.tensors, other.packed.tensors]
        for one, another in zip((*cache.tensors, *packed[0]), (*other.tensors, *packed[1]), strict=True):
            assert torch.equal(one.nan_to_num(7.0), another.nan_to_num(7.0))


@pytest.mark.parametrize("level", native.levels())
def test_layers_with_addresses_of_their_own_match_their_operations(level):
    """Layers with packed blocks, of which an earlier layer with the same window or with their addresses has none."""
    dtype, case = torch.float32, Case("mixed", KV_HEADS, GROUP, HEAD_DIM, block_size=BLOCK_SIZE, format="int4")
    layers = [made(dtype=dtype, **PLAIN, sliding_window=window) for window in (None, None, 40, 40, None)]

    def inputs():
        (second, third, fifth), (paging, *_) = inputs_of(case, dtype, 3)
        first, whole = make_inputs(dataclasses.replace(case, format="int8"), dtype).arrays[1:]
        fourth, other = make_inputs(dataclasses.replace(case, format=None), dtype, seed=1).arrays[1:]
        both = replace_paging(whole, packed=paging.packed)
        return [first, second, third, fourth, fifth], [both, both, paging, other, paging]

    check_layers(layers, inputs(), inputs(), level)


def one_layer(**settings):
    layer = made(dtype=torch.float32, **PLAIN | settings)
    _, cache, paging = make_inputs(Case("decode", group=GROUP, head_dim=HEAD_DIM), torch.float32).arrays
    tokens = len(paging.slots)
    return in_pages([layer], [cache], [paging]), torch.randn(tokens, HIDDEN), torch.randn(1, tokens, HEAD_DIM)


def test_angles_of_different_types_are_rejected():
    layer, rows, angles = one_layer()
    with pytest.raises(RuntimeError, match="cos and sin have different types"):
        layer(rows, angles, angles.bfloat16())


def test_every_layer_needs_a_cache():
    layer = made(dtype=torch.float32, **PLAIN)
    _, cache, _ = make_inputs(Case("decode", group=GROUP, head_dim=HEAD_DIM), torch.float32).arrays
    with pytest.raises(RuntimeError, match="1 layers with 2 caches and 1 pages"):
        DecoderLayers([layer], [cache, cache], [(0, None)])


def test_a_stream_of_another_type_is_rejected():
    layer, rows, angles = one_layer()
    with pytest.raises(RuntimeError, match="another size or type"):
        layer(rows.bfloat16(), angles, angles)


def test_time_of_each_operation_is_counted():
    layer, rows, angles = one_layer()
    before = native.seconds()
    layer(rows, angles, angles)
    spent = {kind for kind, after in native.seconds().items() if after > before[kind]}
    assert spent == {"linear", "rope_kv_write", "paged_attention"}  # which compute norms and activations as well


VOCAB, POSITIONS = 41, 300


def whole_model(dtype, level):
    """Return a model of two layers, a function for what it computes in operations, and the arguments of a step."""
    layers = [made(dtype=dtype, **PLAIN) for _ in range(2)]
    (caches, pagings), (others, _) = (
        inputs_of(Case("mixed", KV_HEADS, GROUP, HEAD_DIM), dtype, 2),
        inputs_of(Case("mixed", KV_HEADS, GROUP, HEAD_DIM), dtype, 2),
    )
    generator = torch.Generator().manual_seed(1)
    embedding, norm = (torch.randn(shape, generator=generator).to(dtype) for shape in ((VOCAB, HIDDEN), (HIDDEN,)))
    head = pack_linear(torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype))
    table = torch.randn(POSITIONS, 2 * HEAD_DIM, generator=generator).to(dtype)
    made_layers = DecoderLayers(layers, caches, [(0, None)] * 2, level=level)
    model = CausalModel(made_layers, embedding, table, norm, 1e-5, head, None)

    def run(ids, positions, rows, paging):
        other = DecoderLayers(layers, others, [(0, None)] * 2, level=level)
        cos, sin = table[positions].chunk(2, -1)
        stream = other(embedding[ids[0]], cos, sin, [paging])
        return linear(add_rms_norm(stream[rows], None, norm, 1e-5, level=level)[0], head, level=level)

    tokens = len(pagings[0].slots)
    ids = torch.randint(VOCAB, (1, tokens), generator=generator)
    positions = torch.randint(POSITIONS, (1, tokens), generator=generator)
    return model, run, ids, positions, pagings[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", native.levels())
def test_a_whole_model_matches_its_operations_bit_for_bit(level, dtype):
    model, run, ids, positions, paging = whole_model(dtype, level)
    used = int(paging.query_starts[-1])
    for rows in (torch.arange(len(ids[0])), torch.tensor([used - 1, 0]), torch.zeros(0, dtype=torch.int64)):
        found, expected = model(ids, positions, rows, [paging]), run(ids, positions, rows, paging)
        assert found.shape == (len(rows), VOCAB)
        assert torch.equal(found[rows < used], expected[rows < used])


@pytest.mark.parametrize(
    ("field", "value", "limit"), [("token", VOCAB, VOCAB - 1), ("position", -1, POSITIONS - 1), ("row", 10**6, 0)]
)
def test_indices_outside_of_a_model_are_rejected(field, value, limit):
    model, _, ids, positions, paging = whole_model(torch.float32, None)
    rows = torch.tensor([0])
    changed = {"token": ids[0], "position": positions[0], "row": rows}[field]
    changed[0] = value
    with pytest.raises(RuntimeError, match=f"{field} {value}: must be 0..{limit or len(ids[0]) - 1}"):
        model(ids, positions, rows, [paging])
