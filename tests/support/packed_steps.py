"""Runs steps over packed batches without an engine: a model, its cache, and sequences with blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items

import numpy as np
import torch
from transformers import PreTrainedModel

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.execution.batch import pack
from paged_backend.execution.runner import paged_logits
from paged_backend.kv.cache import CacheLayout, KVCache
from paged_backend.kv.sequence import Sequence
from paged_backend.loading.verification import verify_model
from paged_backend.models.recurrent import state_shapes
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Plan

BLOCK_SIZE = 4
MAX_BLOCKS = 16  # of one sequence


class PackedSteps:
    """A verified model with room for a number of sequences, at shuffled pages."""

    def __init__(self, model: PreTrainedModel, num_seqs: int, rng: random.Random):
        layers = verify_model(model, block_size=BLOCK_SIZE, kv_dtype=model.dtype)
        self.model, self.rng = model, rng
        layout = CacheLayout.of(layers, BLOCK_SIZE, model.dtype, states=state_shapes(model))
        self._state_pages = layout.blocks.kinds[-1].pages if layout.states else 0
        num_pages = num_seqs * (MAX_BLOCKS + self._state_pages)
        self.kv = KVCache.allocate(layout, num_pages, model.device)
        self.kv.memory.view(torch.float32).fill_(7.0)  # a new sequence must not read what its pages hold
        self._pages = rng.sample(range(num_pages), num_pages)
        self.pages_of: dict[int, list[int]] = {}  # of the blocks with states

    def sequence(self, tokens: Items[int]) -> Sequence:
        """Return a sequence with its own blocks, nothing of which is computed."""
        request = GenerateRequest(len(self._pages), tuple(tokens), SamplingParams(temperature=0.0), 0, frozenset())
        sequence = Group(request).leader
        sequence.tables = [self._take(MAX_BLOCKS)]
        if self._state_pages:
            pages = self._take(self._state_pages)
            self.pages_of[pages[0]] = pages
            sequence.tables.append([pages[0]])
        return sequence

    def _take(self, count: int) -> list[int]:
        return [self._pages.pop() for _ in range(count)]

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a copy of a sequence, with copies of its blocks."""
        copy = self.sequence(sequence.tokens)
        for source, destination in zip(sequence.tables[0], copy.tables[0], strict=True):
            self.kv.write([destination], self.kv.read([source]))
        if self._state_pages:
            self.kv.write(self.pages_of[copy.tables[1][0]], self.kv.read(self.pages_of[sequence.tables[1][0]]))
        copy.computed = sequence.computed
        return copy

    def step(self, *lengths: tuple[Sequence, int]) -> None:
        """Compute that many tokens of each sequence in one step. A sequence without further tokens gets the likeliest
        next one."""
        chunks = tuple(
            Chunk(seq, seq.computed, n, sampled_sequences=(seq,) if n == seq.pending else ()) for seq, n in lengths
        )
        batch = pack(Plan(chunks), block_size=BLOCK_SIZE, state_pages=self._page_rows if self._state_pages else None)
        tokens = iter(paged_logits(self.model, batch, self.kv).argmax(-1).tolist())
        for chunk in chunks:
            chunk.sequence.computed += chunk.length
            if chunk.sampled_sequences:
                chunk.sequence.tokens.append(next(tokens))

    def _page_rows(self, blocks: Items[int]) -> np.ndarray:
        return np.array([self.pages_of[block] for block in blocks])

    def generate(self, prompts: Items[Items[int]], max_tokens: int, max_chunk: int) -> list[list[int]]:
        """Return the greedy tokens of prompts that are computed in random chunks, beside each other's decode."""
        sequences = [self.sequence(prompt) for prompt in prompts]
        while running := [seq for seq in sequences if seq.generated < max_tokens]:
            chosen = self.rng.sample(running, self.rng.randint(1, len(running)))
            self.step(*[(seq, min(seq.pending, self.rng.randint(1, max_chunk))) for seq in chosen])
        return [seq.output for seq in sequences]


def random_prompts(rng: random.Random, lengths: Items[int]) -> list[list[int]]:
    """Return prompts of random tokens."""
    return [[rng.randrange(3, 320) for _ in range(length)] for length in lengths]
