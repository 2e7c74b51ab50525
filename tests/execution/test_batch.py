"""Packing: the tensors of one batch, from a plan of integers."""

import pytest
import torch

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.execution.batch import UniformBatch, pack, resolve_placeholders
from paged_backend.sampling.outputs import Source
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Plan
from paged_kernels import paging
from tests.support.scheduler_stress import request, scheduler


def sequence_of(key, prompt, blocks, **sampling):
    sequence = Group(GenerateRequest(key, tuple(prompt), SamplingParams(**sampling), 0, frozenset())).leader
    sequence.tables = [blocks]
    return sequence


def test_decode_and_prefill_chunks_are_packed_end_to_end():
    decoding, prefilling = sequence_of(0, range(10, 16), [7, 3]), sequence_of(1, range(20, 29), [5, 1, 2])
    batch = pack(Plan((Chunk(decoding, 5, 1, (decoding,)), Chunk(prefilling, 4, 3, ()))), block_size=4)
    assert batch.input_ids.tolist() == [[15, 24, 25, 26]]
    assert batch.position_ids.tolist() == [[5, 4, 5, 6]]
    assert batch.paging.slots.tolist() == [3 * 4 + 1, 4, 5, 6]
    assert batch.paging.block_tables.tolist() == [[7, 3, 0], [5, 1, 2]]
    assert batch.paging.context_lens.tolist() == [6, 7]
    assert batch.paging.query_starts.tolist() == [0, 1, 4]
    assert (batch.paging.max_query_len, batch.paging.max_context_len) == (3, 7)
    assert batch.sample_rows.tolist() == [0]  # the second prompt is not finished
    assert batch.logit_rows is None and not batch.uses_previous_step and batch.is_replayable


def test_samples_of_one_prompt_share_its_last_row():
    sequence = sequence_of(0, range(4), [0], n=3)
    other = sequence_of(1, range(2), [1])
    chunks = (Chunk(sequence, 0, 4, (sequence,) * 3), Chunk(other, 0, 2, (other,)))
    batch = pack(Plan(chunks), block_size=4)
    assert batch.sample_rows.tolist() == [3, 5]
    assert batch.logit_rows.tolist() == [0, 0, 0, 1]


def test_uniform_batches_are_padded_with_computed_tokens_that_write_nothing():
    drafting, plain = sequence_of(0, range(8), [0, 1, 2]), sequence_of(1, range(30, 36), [3, 4])
    drafting.tokens.extend((50, 51))
    chunks = (Chunk(drafting, 7, 3, (drafting,), draft_tokens=(50, 51)), Chunk(plain, 5, 1, (plain,)))
    batch = pack(Plan(chunks), block_size=4, uniform=UniformBatch(queries=3, seqs=8))
    assert batch.input_ids.tolist() == [[7, 50, 51, 33, 34, 35]]
    assert batch.paging.slots.tolist() == [7, 8, 9, -1, -1, 4 * 4 + 1]
    assert batch.sample_rows.tolist() == [0, 1, 2, 5]
    assert [(check.first_sample, check.row, check.draft_tokens) for check in batch.checks] == [(0, 1, (50, 51))]


def test_placeholders_are_replaced_by_tokens_of_the_previous_step():
    tokens = torch.tensor([[5, -1, 7, -3]])
    assert resolve_placeholders(tokens, torch.tensor([40, 41, 42])).tolist() == [[5, 40, 7, 42]]


@pytest.mark.parametrize("prompt", [300, 200])
def test_draft_of_one_sequence_keeps_shared_prefix_of_the_others(prompt, monkeypatch):
    """Sequences without draft tokens are padded only if they share no prefix: sharing needs one row per sequence."""
    monkeypatch.setattr(paging, "MIN_SAVED_TOKENS", 256)
    chunks = []
    for key, drafts in enumerate([(1, 2, 3), (), (), ()]):
        sampling = SamplingParams(max_tokens=9)
        sequence = Group(GenerateRequest(key, (5,) * prompt, sampling, 0, frozenset())).leader
        sequence.tables = [[*range(18), 20 + key]]
        sequence.tokens.extend(drafts)
        chunks.append(Chunk(sequence, prompt - 1, 1 + len(drafts), (sequence,), draft_tokens=drafts))
    packed = pack(Plan(tuple(chunks)), block_size=16, gqa_group=4, uniform=UniformBatch(queries=4, seqs=8))
    if prompt > paging.MIN_SHARED_TOKENS:
        assert packed.paging.shared.lens.tolist() == [0, 288, 288, 288]
        assert packed.paging.query_starts.tolist() == [0, 4, 5, 6, 7]
    else:
        assert packed.paging.shared is None
        assert packed.paging.query_starts.tolist() == [0, 4, 8, 12, 16]


def test_fingerprints_are_of_the_rows_of_requests_with_a_digest():
    """Between scored requests without one. Rows of the prompt count among the sample rows, others among the tokens."""
    sched = scheduler()
    for key, (length, digest) in enumerate(((3, False), (5, True), (2, False), (1, True), (4, True))):
        sched.add(request(key, range(length), prompt_logprobs=0, n=1 + key % 2, logits_digest=digest))
    packed = pack(sched.schedule(), block_size=4)
    sampled, prompt = (one for one in packed.sampling.outputs if one.name == "fingerprints")
    assert packed.sample_rows.tolist() == list(range(15))
    assert (sampled.source, prompt.source) == (Source.SAMPLED, Source.PROMPT)
    assert sampled.owners == tuple(sampled.rows.tolist()) == (1, 2, 4, 5, 6)
    assert prompt.rows.tolist() == [3, 4, 5, 6, 11, 12, 13]
    assert prompt.owners == (1, 1, 1, 1, 4, 4, 4)
