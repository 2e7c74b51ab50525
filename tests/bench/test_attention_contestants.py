"""Implementations of attention, and the targets of the comparison."""

from dataclasses import replace

import pytest
import torch

from paged_bench import kernels
from paged_bench._attention import AttentionInputs, Cell, error
from paged_bench._attention_contestants import CONTESTANTS, NO_SHARED_PREFIX, UNQUANTIZED, contestants, targets


@pytest.mark.parametrize("change", [{"mixed": True}, {"pool": torch.int8}, {"query": 9, "context": 40}])
def test_all_attention_contestants_agree(change):
    half = torch.float32
    cell = replace(Cell("decode", 3, 70, 1, 6, 2, 16, half, half), **change)
    prepared = AttentionInputs(cell, torch.device("cpu"), 1 << 20)
    tried = [CONTESTANTS[who] for who in ("paged", "SDPA, contiguous", "gather + SDPA")]
    for make in tried if cell.pool == cell.dtype else [tried[0], tried[2]]:
        assert error(prepared, make(prepared)(0)) < 1e-4


def test_every_attention_target_has_a_baseline():
    """Targets that compare cells of the GPU grid: KV dtype, shared prefix and long context."""
    cells = kernels.grid(torch.device("cuda"), quick=False)
    aimed = {who: value for cell in cells for who, value in targets(cell).items()}
    assert aimed.keys() <= CONTESTANTS.keys()
    assert aimed[UNQUANTIZED] == 1.8
    for cell in cells:
        who = contestants(cell, torch.device("cuda"))
        assert (UNQUANTIZED in who) == (cell.pool != cell.dtype)
        assert (NO_SHARED_PREFIX in who) == (cell.shared > 0)
    (one,) = (cell for cell in cells if cell.shared and cell.batch == 64)
    assert targets(one)[NO_SHARED_PREFIX] == pytest.approx(0.7 * 8.0)  # the formula's 8 for 64 rows of 2,048 + 256
    long = [cell for cell in cells if cell.batch == 1 and cell.context == 32768 and cell.kind == "decode"]
    assert long and all(targets(cell)["vLLM"] == 1.15 for cell in long)
