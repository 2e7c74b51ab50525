"""Runs steps over packed batches without an engine: a model, its caches, and sequences with blocks and state slots."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items

from transformers import PreTrainedModel

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.execution.batch import pack
from paged_backend.execution.runner import paged_logits
from paged_backend.kv.cache import CacheLayout, KVCache, StateCache
from paged_backend.kv.sequence import Sequence
from paged_backend.loading.verification import verify_model
from paged_backend.models.recurrent import state_shapes
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Plan

BLOCK_SIZE = 4
MAX_BLOCKS = 16  # of one sequence


class PackedSteps:
    """A verified model with room for a number of sequences, at shuffled blocks and state slots."""

    def __init__(self, model: PreTrainedModel, num_seqs: int, rng: random.Random):
        layers = verify_model(model, block_size=BLOCK_SIZE, kv_dtype=model.dtype)
        self.model, self.rng = model, rng
        num_blocks = num_seqs * MAX_BLOCKS
        self.kv = KVCache.allocate(CacheLayout.of(layers, BLOCK_SIZE, model.dtype), num_blocks, model.device)
        self.states = StateCache.allocate(state_shapes(model), num_slots=num_seqs, device=model.device)
        for tensor in self.states.tensors:
            tensor.fill_(7.0)  # a new sequence must not read what its slot holds
        self._blocks = rng.sample(range(num_blocks), num_blocks)
        self._slots = rng.sample(range(num_seqs), num_seqs)

    def sequence(self, tokens: Items[int]) -> Sequence:
        """Return a sequence with its own blocks and state slot, nothing of which is computed."""
        request = GenerateRequest(len(self._slots), tuple(tokens), SamplingParams(temperature=0.0), 0, frozenset())
        sequence = Group(request).leader
        sequence.tables = [[self._blocks.pop() for _ in range(MAX_BLOCKS)]]
        sequence.state_slot = self._slots.pop()
        return sequence

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a copy of a sequence, with copies of its blocks and of its state."""
        copy = self.sequence(sequence.tokens)
        for source, destination in zip(sequence.tables[0], copy.tables[0], strict=True):
            self.kv.write([destination], self.kv.read([source]))
        assert sequence.state_slot is not None and copy.state_slot is not None
        self.states.copy_slots([(sequence.state_slot, copy.state_slot)])
        copy.computed = sequence.computed
        return copy

    def step(self, *lengths: tuple[Sequence, int]) -> None:
        """Compute that many tokens of each sequence in one step. A sequence without further tokens gets the likeliest
        next one."""
        chunks = tuple(
            Chunk(seq, seq.computed, n, sampled_sequences=(seq,) if n == seq.pending else ()) for seq, n in lengths
        )
        batch = pack(Plan(chunks), block_size=BLOCK_SIZE)
        tokens = iter(paged_logits(self.model, batch, self.kv, self.states).argmax(-1).tolist())
        for chunk in chunks:
            chunk.sequence.computed += chunk.length
            if chunk.sampled_sequences:
                chunk.sequence.tokens.append(next(tokens))

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
