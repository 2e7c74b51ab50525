"""Packed LoRA factors add what stacked ones do, and the same bits for any number of rows and adapters."""

from functools import partial

import numpy as np
import pytest
import torch

from paged_backend.models.lora import PackedFactors, RowsBySlot, StackedFactors, adapter_rows
from paged_backend.models.peft_files import Factors

SLOTS, RANK, INPUTS, OUTPUTS = 3, 8, 40, 27


@pytest.fixture
def factors():
    generator = torch.Generator().manual_seed(0)
    random = partial(torch.randn, generator=generator)
    return {slot: Factors(random((rank, INPUTS)), random((OUTPUTS, rank))) for slot, rank in ((0, 8), (2, 5))}


@pytest.fixture
def packed(factors):
    made = PackedFactors(INPUTS, OUTPUTS, slots=SLOTS, rank=RANK)
    for slot, one in factors.items():
        made.load_slot(slot, one)
    return made


def add(packed, x, slots):
    y = torch.ones(len(x), OUTPUTS + 4, dtype=torch.bfloat16)
    packed.add(y[:, 2:-2], x, RowsBySlot.of(adapter_rows(np.array(slots)), SLOTS))
    assert (y[:, :2] == 1).all() and (y[:, -2:] == 1).all()
    return y[:, 2:-2]


def test_rows_get_the_output_of_their_adapter(packed, factors):
    stacked = StackedFactors(torch.zeros(SLOTS, RANK, INPUTS), torch.zeros(SLOTS, RANK, OUTPUTS))
    for slot, one in factors.items():
        stacked.load_slot(slot, one)
    x, slots = torch.randn(7, INPUTS), [2, -1, 0, 1, 0, -1, 2]
    expected = torch.ones(7, OUTPUTS, dtype=torch.bfloat16)
    stacked.add(expected, x, adapter_rows(np.array(slots)))
    found = add(packed, x, slots)
    torch.testing.assert_close(found, expected, atol=1e-1, rtol=1e-2)
    assert (found[[1, 3, 5]] == 1).all()  # without an adapter, or with one that does not change this layer


def test_bits_do_not_depend_on_other_rows(packed):
    x, slots = torch.randn(60, INPUTS), [(7 * row) % 4 - 1 for row in range(60)]
    alone = torch.cat([add(packed, x[row : row + 1], slots[row : row + 1]) for row in range(60) if slots[row] >= 0])
    assert torch.equal(add(packed, x, slots)[[row for row in range(60) if slots[row] >= 0]], alone)


def test_cleared_slot_adds_nothing(packed):
    packed.load_slot(2, None)
    assert (add(packed, torch.randn(2, INPUTS), [2, 2]) == 1).all()
