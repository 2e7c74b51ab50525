"""Inputs of captured steps: Triton in the interpreter or on a GPU, and PyTorch on a CPU."""

import pytest
import torch

from paged_kernels.cpu import pytorch
from paged_kernels.step_inputs import (
    EMBED_TILE,
    TILE,
    embed,
    embed_reference,
    step_inputs,
    step_inputs_reference,
)


def inputs(num_tokens, num_seqs, width, where):
    generator = torch.Generator().manual_seed(1)

    def integers(low, high, *shape, dtype):
        return torch.randint(low, high, shape, generator=generator).to(where, dtype)

    previous = integers(-1, 90, 40, dtype=torch.int64)
    tables = torch.full((num_seqs, width + 3), -7, dtype=torch.int32, device=where)
    return dict(
        tokens=integers(-40, 90, 1, num_tokens, dtype=torch.int64),
        previous=previous,
        tables=tables,
        packed_tables=integers(0, 1000, num_seqs * width + 5, dtype=torch.int32),
        table_width=torch.tensor([width], dtype=torch.int32, device=where),
        context_lens=integers(0, 4 * width + 1, num_seqs, dtype=torch.int32),
    )


@pytest.mark.parametrize(("implementation", "where"), [(step_inputs, None), (pytorch.step_inputs, "cpu")])
@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "width"), [(1, 1, 1), (3, 8, 5), (20, 4, TILE + 1), (2 * TILE + 1, 2, 3), (8, 8, 0)]
)
def test_step_inputs(implementation, where, num_tokens, num_seqs, width, device):
    arguments = inputs(num_tokens, num_seqs, width, where or device)
    expected = arguments | {"tables": arguments["tables"].clone()}
    tokens = implementation(**arguments, block_size=4)
    assert torch.equal(tokens, step_inputs_reference(**expected, block_size=4))
    assert torch.equal(arguments["tables"], expected["tables"])


@pytest.mark.parametrize(("implementation", "where"), [(embed, None), (pytorch.embed, "cpu")])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "width"),
    [(1, 8, 4), (5, 576, 128), (3, EMBED_TILE, 64), (2, 2 * EMBED_TILE + 8, 96), (0, 8, 4)],
)
def test_embeddings_and_angles_are_copied(implementation, where, num_tokens, hidden, width, device):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, hidden, generator=generator).to(where or device, torch.float16)
    table = torch.randn(70, width, generator=generator).to(where or device)
    ids, positions = (torch.randint(n, (num_tokens,), generator=generator).to(where or device) for n in (50, 70))
    found = implementation(ids, positions, weight, table)
    if num_tokens:
        expected = embed_reference(ids, positions, weight, table)
        assert all(map(torch.equal, found, expected))
    assert [rows.shape for rows in found] == [(num_tokens, hidden), (num_tokens, width)]
