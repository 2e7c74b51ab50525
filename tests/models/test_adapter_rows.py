"""The assignment of rows to adapter slots."""

import numpy as np

from paged_backend.models.adapter_rows import adapter_rows


def test_each_row_uses_its_own_slot_only():
    rows = adapter_rows(np.array([5, -1, 2, 5]))
    assert rows.used == (2, 5)
    assert rows.slots.tolist() == [2, 5]
    assert rows.masked[..., 0].tolist() == [[True, False], [True, True], [False, True], [True, False]]


def test_rows_without_adapters_use_no_slot():
    rows = adapter_rows(np.array([-1, -1]))
    assert rows.used == ()
    assert rows.masked.shape == (2, 0, 1)
