"""Draft models: each round proposes one token per sequence, from the tokens proposed before."""

import torch

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.execution.batch import pack
from paged_backend.execution.drafter import propose
from paged_backend.kv.blocks import BlockManager
from paged_backend.scheduling.plan import StepResult
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.speculation import propose_placeholders

VOCAB = 50


def drafted_batch(max_tokens):
    """Return the first decode step of requests with so many tokens, whose last tokens are 10, 20 and so on."""
    scheduler = Scheduler(
        BlockManager(32, BlockLayout(4)), max_num_seqs=8, max_num_batched_tokens=64, proposer=propose_placeholders,
        max_draft_tokens=3,
    )  # fmt: skip
    for key, count in enumerate(max_tokens):
        scheduler.add(
            GenerateRequest(key, (1, 2, 3, 4), SamplingParams(max_tokens=count, temperature=0), 0, frozenset())
        )
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult.of_tokens(10 * (key + 1) for key in range(len(max_tokens))))
    return pack(scheduler.schedule(), block_size=4, draft=True)


def count_up(seen):
    """Return a draft model that continues each token with the next number, and records its batches."""

    def forward(batch):
        seen.append(batch)
        return torch.nn.functional.one_hot(batch.input_ids[0] + 1, VOCAB).float()

    return forward


def test_each_round_continues_the_tokens_of_the_one_before():
    """The third sequence has room for one draft token only."""
    batch = drafted_batch([9, 9, 3])
    seen = []
    ids = propose(batch, batch.drafting, count_up(seen)).input_ids
    assert ids.tolist() == [[10, 11, 12, 13, 20, 21, 22, 23, 30, 31]]
    assert [one.input_ids.tolist() for one in seen] == [[[10, 20, 30]], [[11, 21]], [[12, 22]]]
    assert [one.paging.context_lens.tolist() for one in seen] == [[5, 5, 5], [6, 6], [7, 7]]


def test_rounds_write_to_the_blocks_of_their_sequences():
    batch = drafted_batch([9, 9])
    seen = []
    propose(batch, batch.drafting, count_up(seen))
    for number, one in enumerate(seen):
        assert torch.equal(one.paging.slots, batch.paging.slots.reshape(2, 4)[:, number])
        assert torch.equal(one.paging.block_tables, batch.paging.block_tables)


def test_logits_that_are_not_finite_propose_a_valid_token():
    """The model verifies it in any case."""
    batch = drafted_batch([9])
    ids = propose(batch, batch.drafting, lambda one: torch.full((1, VOCAB), float("nan"))).input_ids
    assert ids.tolist() == [[10, 0, 0, 0]]
