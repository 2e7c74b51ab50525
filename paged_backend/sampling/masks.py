"""Which tokens may be drawn, where a request says so: a bit for each token of the vocabulary, for the rows that ask.

A guide tells it for one output. It follows the output's tokens and nothing else: what becomes of the sequence's blocks,
and what else is in the batch, is the same to it.
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
from paged_backend.scheduling.sequence import Sequence as Sample

BITS = 32  # tokens of a word: token t is bit t % 32 of word t // 32


_FORBIDDING = ("allowed_token_ids", "bad_words", "bad_words_token_ids", "min_tokens")  # of SamplingParams


@dataclass(frozen=True, eq=False)
class Mask:
    """Rows that may draw some tokens only."""

    rows: Tensor  # [num_rows] int64
    bits: Tensor  # [num_rows, num_words] int32; what they do not reach may not be drawn
    failed_rows: tuple[
        tuple[int, str], ...
    ] = ()  # rows with nothing left to draw, and why: what they draw counts for nothing


ConstrainedRows = Sequence[tuple[int, Sample, int]]  # a row, a sequence, and the position of the token to draw


def build_mask(asking: ConstrainedRows, forbidden: Mapping[int, Sequence[int]]) -> Mask | None:
    """Of these rows those that may draw some tokens only. forbidden: tokens that a row may not draw, by the row: where
    there is a guide it may come to nothing but those."""
    masked = [one for one in asking if one[1].request.guides or one[1].request.allowed is not None]
    if not masked:
        return None
    rows, failed_rows = [], []
    for row, sequence, position in masked:
        try:
            rows.append(_words(sequence, position, forbidden.get(row, ())))
        except GuideError as error:
            rows.append(np.full(1, -1, dtype=np.int32))  # not nothing at all
            failed_rows.append((row, str(error)))
    bits = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for mine, words in zip(bits, rows, strict=True):
        mine[: len(words)] = words
    return Mask(torch.tensor([row for row, _, _ in masked]), torch.from_numpy(bits), tuple(failed_rows))


def _words(sequence: Sample, position: int, forbidden: Sequence[int]) -> np.ndarray:
    request, allowed = sequence.request, sequence.request.allowed
    if not request.guides:
        assert allowed is not None
        return np.frombuffer(allowed, "<i4")
    guide, generated = request.guides[sequence.index], position - sequence.num_prompt
    words = np.zeros(guide.num_words, dtype=np.int32)
    if guide.seen < generated:
        guide.advance(sequence.tokens[sequence.num_prompt + guide.seen : position])
    guide.fill(words)
    if generated < request.sampling.min_tokens:
        without = _without(words, request.stop_ids)
        words = without if without.any() else words  # an output that is complete ends
    words = _without(words, forbidden)
    if allowed is not None:
        both = min(len(words), len(allowed) // 4)
        words = words[:both] & np.frombuffer(allowed, "<i4")[:both]
    if not words.any():
        raise GuideError(f"no token is left: {_constraining(request)} leave none that may come next")
    return words


def _constraining(request: GenerateRequest) -> str:
    """The fields of a request that forbid tokens. A logit_bias is finite, and so is none of them."""
    sampling = request.sampling
    names = [sampling.structure.field] if sampling.structure else []
    names += [name for name in _FORBIDDING if getattr(sampling, name)]
    return " and ".join(names)


def _without(words: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    words = words.copy()
    for token in tokens:
        if token < len(words) * BITS:
            words.view(np.uint32)[token // BITS] &= ~np.uint32(1 << token % BITS)
    return words


def apply_mask(logits: Tensor, mask: Mask) -> Tensor:
    """logits [num_rows, vocab] with -infinity for every token that may not be drawn; a new tensor."""
    biases = _biases(mask.bits, logits)
    if len(mask.rows) == len(logits):
        return biases.add_(logits)
    return logits.index_put((mask.rows,), biases.add_(logits[mask.rows]))


def _biases(bits: Tensor, logits: Tensor) -> Tensor:  # [num_rows, num_words] int32 -> [num_rows, vocab] like logits
    """0 for tokens that may be drawn, -infinity for others. Eight of them a look-up, and added: choosing by single bits
    takes a CPU ten times as long."""
    biases = embedding(bits.view(torch.uint8).int(), _table(logits.dtype, logits.device)).flatten(1)
    vocab, reached = logits.shape[-1], biases.shape[-1]
    return biases[:, :vocab] if reached >= vocab else pad(biases, (0, vocab - reached), value=float("-inf"))


@cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:  # [256, 8]: of each byte, lowest bit first
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits > 0, 0.0, float("-inf")).to(device, dtype)
