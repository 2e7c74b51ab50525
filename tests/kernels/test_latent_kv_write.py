"""The write of latents with their norm and rotation: Triton in the interpreter or on a GPU, PyTorch on a CPU."""

from functools import partial
from itertools import product

import pytest
import torch
from torch.testing import assert_close
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from paged_kernels import ops
from paged_kernels.cpu import native
from paged_kernels.cpu.pytorch import latent_kv_write as latent_kv_write_cpu
from paged_kernels.kv_write import latent_kv_write, latent_kv_write_reference, rotate_reference
from paged_kernels.layer_cache import FORMATS, LayerCache
from tests.support.layer_cases import CPU_DTYPES, TOLERANCES, TRITON_DTYPES, name, normal
from tests.support.pairwise import pairwise

WRITES = [  # implementation, device, type, and whether the C++ kernels are compiled
    *((latent_kv_write, None, dtype, False) for dtype in TRITON_DTYPES),
    *product([latent_kv_write_cpu], ["cpu"], CPU_DTYPES, [True, False]),
]
ORDERS = {"pairs": (True, True), "pairs to halves": (True, False), "halves": (False, False)}
SHAPES = [(1, 2, 2, 3), (5, 24, 16, 32), (3, 40, 6, 20)]  # heads, elements that are not rotated, rope, rank


def angles_of(rope, device, dtype):
    angles = torch.outer(torch.arange(7.0) + 3, 2.0 ** -torch.arange(rope // 2).clamp(max=20)).repeat(1, 2)
    return [turn.to(device, dtype) for turn in (angles.cos(), angles.sin())]


def write(num_heads, nope, rope, rank, *, dtype, device, format):
    """Make arguments of `latent_kv_write`: seven tokens, two of them without a slot, in rows of wider tensors."""
    query = normal(7, num_heads, nope + rope + 1, dtype=dtype, device=device)[..., 1:]
    latents = 3 * normal(7, rank + rope + 2, dtype=dtype, device=device, seed=1)[:, 2:]
    weight = 1 + normal(rank, dtype=dtype, device=device, seed=2) / 4
    stored = next((one for one, name in FORMATS.items() if name == format), dtype)
    keys = torch.zeros((16, 1, 4, rank + rope), dtype=stored, device=device)
    scales = torch.zeros((16, 1, 4), device=device) if format else None
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(64, generator=generator)[:7].index_fill(0, torch.tensor([2, 6]), -1).to(device)
    angles = angles_of(rope, device, dtype)
    return query, latents, weight, 1e-2, *angles, LayerCache.latent(keys, rank, scales), slots


@pytest.mark.parametrize(
    ("shape", "case", "format", "order"), pairwise(SHAPES, WRITES, [None, *FORMATS.values()], ORDERS), ids=name
)
def test_latent_kv_write(shape, case, format, order, device, monkeypatch):
    implementation, where, dtype, compiled = case
    if not compiled:
        monkeypatch.setattr(native, "levels", lambda: ())
    orders = dict(zip(("from_pairs", "to_pairs"), ORDERS[order], strict=True))
    actual, expected = (write(*shape, dtype=dtype, device=where or device, format=format) for _ in range(2))
    found, wanted = implementation(*actual, **orders), latent_kv_write_reference(*expected, **orders)
    assert_close(found, wanted, **TOLERANCES[dtype])
    assert_close(actual[0], expected[0], rtol=0, atol=0)
    cache, right = actual[6], expected[6]
    assert right.keys.float().any()
    if format is None:
        assert_close(cache.keys, right.keys, **TOLERANCES[dtype])
    else:  # the nearest code, or the next one after different rounding
        assert_close(cache.key_scales, right.key_scales, **TOLERANCES[dtype])
        read = [c.keys.float() * c.key_scales[..., None] for c in (cache, right)]
        assert_close(*read, rtol=0.13, atol=2 * float(right.key_scales.max()))


def test_rotations_match_transformers():
    x, (cos, sin) = normal(7, 5, 16, dtype=torch.float32, device="cpu"), angles_of(16, "cpu", torch.float32)
    heads = x.transpose(0, 1)[None]
    rotate = partial(rotate_reference, x, cos, sin)
    expected = {
        "pairs": v2.apply_rotary_emb(heads, heads, torch.complex(cos, sin)[None, :, :8])[0],
        "pairs to halves": v3.apply_rotary_pos_emb_interleave(heads, heads, cos[None], sin[None])[0],
        "halves": v3.apply_rotary_pos_emb(heads, heads, cos[None], sin[None])[0],
    }
    for order, (from_pairs, to_pairs) in ORDERS.items():
        assert_close(rotate(from_pairs=from_pairs, to_pairs=to_pairs), expected[order][0].transpose(0, 1))


def test_odd_number_of_rotated_elements_is_rejected():
    query, latents, weight, eps, cos, sin, cache, slots = write(
        2, 3, 2, 4, dtype=torch.float32, device="cpu", format=None
    )
    odd = LayerCache.latent(cache.keys[..., :5], 4)
    with pytest.raises(ValueError, match="rope=1: must be even"):
        ops.latent_kv_write(
            query, latents[:, :5], weight, eps, cos[:, :1], sin[:, :1], odd, slots, from_pairs=False, to_pairs=False
        )
