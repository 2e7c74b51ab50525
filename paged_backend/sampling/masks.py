"""Token bitmasks: one bit per vocabulary token, for the rows of a step whose request restricts its tokens.

A guide computes the mask of one output from that output's tokens alone. Preemption, recomputation and the other
requests of the batch do not affect it. The scheduler has it computed before the step (`MaskBudget`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from paged_backend.api.guide import GuideError
from paged_backend.api.request import GenerateRequest
from paged_backend.kv.sequence import Sequence as Sample

BITS = 32  # tokens per mask word; token t is bit t % 32 of word t // 32

# The fields of SamplingParams that can exclude tokens.
_EXCLUDING_FIELDS = ("allowed_token_ids", "bad_words", "bad_words_token_ids", "min_tokens")


@dataclass(frozen=True, eq=False)
class Mask:
    """Token bitmasks of the rows that may sample only some tokens."""

    rows: Tensor  # [num_rows] int64
    bits: Tensor  # [num_rows, num_words] int32; tokens beyond the last word are masked out
    # Rows without a valid token left, and why. Their samples are discarded.
    failed_rows: tuple[tuple[int, str], ...] = ()


ConstrainedRows = Sequence[tuple[int, Sample, int]]  # (row, sequence, position of the token to sample)


def build_mask(constrained: ConstrainedRows, excluded: Mapping[int, Sequence[int]]) -> Mask | None:
    """Return the bitmasks of the rows that have a guide or allowed_token_ids, or None if there are none.

    `excluded` lists, by row, more tokens to exclude from a guide's mask. Excluding them here, and not only in the
    logits, detects that the guide allows no other token.
    """
    masked = [entry for entry in constrained if entry[1].request.guides or entry[1].request.allowed is not None]
    if not masked:
        return None
    rows, failed_rows = [], []
    for row, sequence, position in masked:
        try:
            rows.append(_words(sequence, position, excluded.get(row, ())))
        except GuideError as error:
            rows.append(np.full(1, -1, dtype=np.int32))  # allows some tokens, because sampling needs a valid one
            failed_rows.append((row, str(error)))
    bits = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for row_bits, words in zip(bits, rows, strict=True):
        row_bits[: len(words)] = words
    return Mask(torch.tensor([row for row, _, _ in masked]), torch.from_numpy(bits), tuple(failed_rows))


def _words(sequence: Sample, position: int, excluded: Sequence[int]) -> np.ndarray:
    request, allowed = sequence.request, sequence.request.allowed
    if not request.guides:
        assert allowed is not None
        return np.frombuffer(allowed, "<i4")
    guide, generated = request.guides[sequence.index], position - sequence.num_prompt
    words = np.zeros(guide.num_words, dtype=np.int32)
    assert guide.seen == generated, "the mask was not computed"
    guide.fill(words)
    if generated < request.sampling.min_tokens:
        without = _without(words, request.stop_ids)
        words = without if without.any() else words  # a complete output may end before min_tokens
    words = _without(words, excluded)
    if allowed is not None:
        common = min(len(words), len(allowed) // 4)
        words = words[:common] & np.frombuffer(allowed, "<i4")[:common]
    if not words.any():
        raise GuideError(f"no token is left: {_constraining(request)} exclude every possible next token")
    return words


def _constraining(request: GenerateRequest) -> str:
    """Return the request's fields that exclude tokens. logit_bias is finite and therefore not among them."""
    sampling = request.sampling
    names = [sampling.structure.field] if sampling.structure else []
    names += [name for name in _EXCLUDING_FIELDS if getattr(sampling, name)]
    return " and ".join(names)


def _without(words: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    words = words.copy()
    for token in tokens:
        if token < len(words) * BITS:
            words.view(np.uint32)[token // BITS] &= ~np.uint32(1 << token % BITS)
    return words


def apply_mask(logits: Tensor, mask: Mask) -> Tensor:
    """Return a copy of logits [num_rows, vocab] with -infinity for every token that is masked out."""
    biases = _biases(mask.bits, logits)
    if len(mask.rows) == len(logits):
        return logits + biases  # not in place: the result has the strides of logits, for which kernels are compiled
    return logits.index_put((mask.rows,), biases.add_(logits[mask.rows]))


def _biases(bits: Tensor, logits: Tensor) -> Tensor:  # [num_rows, num_words] int32 -> [num_rows, vocab] like logits
    """Return 0 for allowed tokens and -infinity for the others.

    One table look-up expands a byte of the mask, that is eight tokens. Testing single bits takes ten times as long on a
    CPU.
    """
    biases = embedding(bits.view(torch.uint8).int(), _table(logits.dtype, logits.device)).flatten(1)
    vocab, covered = logits.shape[-1], biases.shape[-1]
    return biases[:, :vocab] if covered >= vocab else pad(biases, (0, vocab - covered), value=float("-inf"))


@cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:  # [256, 8]: the biases of each byte, lowest bit first
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits > 0, 0.0, float("-inf")).to(device, dtype)
