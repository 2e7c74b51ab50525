"""Fingerprints of logits change with every bit and with the order, and do not depend on the other rows."""

import hashlib

import pytest
import torch

from paged_backend.sampling.fingerprints import compute, fingerprints, read

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def flipped(row, index, bit):
    """Return a copy of a row with one bit of one element changed."""
    integers = row.clone().view(torch.int32 if row.dtype == torch.float32 else torch.int16)
    integers[index] ^= torch.tensor(1 << bit).to(integers.dtype)
    return integers.view(row.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_changes_both_halves(dtype):
    row = torch.randn(50, generator=torch.Generator().manual_seed(1)).to(dtype)
    changed = [flipped(row, index, bit) for index in range(50) for bit in range(8 * row.element_size())]
    original, *others = fingerprints(torch.stack([row, *changed]))
    assert all((original != other).all() for other in others)
    assert len({tuple(one.tolist()) for one in (original, *others)}) == 1 + len(changed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_order_changes_it(dtype):
    row = torch.arange(200).to(dtype)
    swapped = [row[[*range(first), second, *range(first + 1, second), first, *range(second + 1, 200)]]
               for first in range(0, 199, 7) for second in range(first + 1, 200, 11)]  # fmt: skip
    found = {tuple(one.tolist()) for one in fingerprints(torch.stack([row, row.roll(1), *swapped]))}
    assert len(found) == 2 + len(swapped)


def test_rows_do_not_depend_on_each_other():
    """More rows than are computed at a time, from a tensor that is not contiguous."""
    logits = torch.randn(150, 60)[:, ::2]
    tensors = compute(logits, torch.zeros(150, 2, dtype=torch.int64), (0,) * 150)
    alone = [fingerprints(logits[row : row + 1]).numpy().tobytes() for row in range(150)]
    assert list(read(tensors, (0,) * 150, 2)) == [[one, one] for one in alone]


def test_values_stay_the_same_between_versions():
    logits = torch.arange(1000).view(2, 500) / 256
    digest = hashlib.sha256(fingerprints(logits).numpy().tobytes()).hexdigest()
    assert digest == "6fc041ffa72b47a87ea5ef3b742cf106d6b7409da236d42f23a520424d5879b7"


def test_negative_zero_is_not_zero():
    first, second = fingerprints(torch.tensor([[0.0, 1.0], [-0.0, 1.0]]))
    assert (first != second).all()
