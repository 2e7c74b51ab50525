"""Digests of logits that rounding does not change, to compare with those of transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


def fingerprints_of_tokens(logits: Tensor) -> Tensor:
    """Replace `fingerprints`: return the most likely token of each row."""
    return logits.argmax(-1, keepdim=True).expand(-1, 2)


def digest_of_tokens(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], *, scored: bool = False
) -> str:
    """Return the digest of an output with these fingerprints. scored: whether it covers the prompt."""
    with torch.inference_mode():
        best = fingerprints_of_tokens(model(torch.tensor([[*prompt, *tokens]])).logits[0])
    covered = best[0 if scored else len(prompt) - 1 : len(prompt) - 1 + len(tokens)]
    return hashlib.sha256(covered.contiguous().numpy().tobytes()).hexdigest()
