"""Steps of a scheduler alone, in which every sequence samples the same token."""

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.kv.blocks import BlockManager
from paged_backend.scheduling.plan import StepResult
from paged_backend.scheduling.scheduler import Scheduler

EOS = 7


def request(key, prompt, max_tokens=4, returns_usage=False, **sampling):
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return GenerateRequest(
        key, tuple(range(100, 100 + prompt)), params, 0, frozenset({EOS}), returns_usage=returns_usage
    )


def scheduler(num_blocks=16, block_size=4, *, caching=False, max_num_seqs=8, max_num_batched_tokens=16, **options):
    """Return a scheduler with a pool of its own. options: further ones of `Scheduler`."""
    return Scheduler(
        BlockManager(num_blocks, BlockLayout(block_size), caching=caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **options,
    )


def shape(plan):
    return [(chunk.sequence.key, chunk.start, chunk.length, bool(chunk.sampled_sequences)) for chunk in plan.chunks]


def sampled(plan, token=1):
    """Return the result of a step in which every sequence samples `token`."""
    return StepResult.of_tokens(token for chunk in plan.chunks for _ in chunk.sampled_sequences)


def step(sched, token=1):
    """Run one step in which every sequence samples `token`."""
    plan = sched.schedule()
    sched.check()
    deltas = sched.commit(plan, sampled(plan, token))
    sched.check()
    return plan, deltas
