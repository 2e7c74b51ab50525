"""Steps of a scheduler alone, in which every sequence samples the same token."""

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.step_result import StepResult

EOS = 7


def request(key, prompt, max_tokens=4, returns_usage=False, **sampling):
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return GenerateRequest(
        key, tuple(range(100, 100 + prompt)), params, 0, frozenset({EOS}), returns_usage=returns_usage
    )


def scheduler(num_blocks=16, block_size=4, max_num_seqs=8, max_num_batched_tokens=16, stages=1):
    return Scheduler(
        BlockManager(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        stages=stages,
    )


def shape(plan):
    return [(chunk.sequence.key, chunk.start, chunk.length, bool(chunk.sampled_sequences)) for chunk in plan.chunks]


def step(sched, token=1):
    """Run one step in which every sequence samples `token`."""
    plan = sched.schedule()
    sched.check()
    deltas = sched.commit(plan, StepResult.of_tokens(token for chunk in plan.chunks for _ in chunk.sampled_sequences))
    sched.check()
    return plan, deltas
