"""The registry of open requests: aborts and ends free their blocks."""

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import Origin
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import Chain
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.step_result import StepResult
from tests.support.scheduler_steps import request, scheduler, step


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_abort_frees_blocks_immediately(when):
    sched = scheduler()
    sched.add(request(0, prompt=20, max_tokens=9))
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 3}[when]):
        step(sched)
    assert sched.abort(0)
    sched.check()
    assert sched.blocks.num_used == 0
    assert not sched.has_work
    assert not sched.abort(0)
    assert not sched.abort(99)
    assert sched.schedule() is None


@pytest.mark.parametrize(("code", "hits"), [(ErrorCode.INTERNAL, 0), (ErrorCode.INVALID_ARGUMENT, 3)])
def test_blocks_of_a_request_are_not_cached_after_an_internal_error(code, hits):
    """Their keys and values may be wrong."""
    blocks = BlockManager(16, 4, caching=True)
    sched = Scheduler(blocks, max_num_seqs=8, max_num_batched_tokens=16)
    sched.add(request(0, prompt=13))
    (delta,) = sched.commit(sched.schedule(), StepResult([[1]], errors={0: RequestError(code, "no token")}))
    sched.check()
    assert (delta.error.code, blocks.num_used, sched.has_work) == (code, 0, False)
    assert len(blocks.match(Chain(Origin("")), [*range(100, 113), 0]).blocks) == hits
