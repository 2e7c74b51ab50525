"""The error of an attention kernel's output."""

import torch

from paged_bench._attention import AttentionInputs, Cell, error
from paged_bench._attention_contestants import CONTESTANTS


def test_wrong_attention_output_is_detected():
    cell = Cell("decode", 3, 70, 1, 6, 2, 16, torch.float32, torch.float32)
    prepared = AttentionInputs(cell, torch.device("cpu"), 1 << 20)
    assert error(prepared, CONTESTANTS["paged"](prepared)(0).roll(1, 0)) > 0.1
