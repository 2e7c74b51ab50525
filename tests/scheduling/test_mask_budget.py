"""The time for masks in a step: expensive grammars take turns, all other sequences run in every step."""

from collections import Counter
from dataclasses import replace

import pytest

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.request import Progress
from paged_backend.kv.blocks import BlockManager
from paged_backend.scheduling.budgets import MaskBudget
from paged_backend.scheduling.plan import StepResult
from paged_backend.scheduling.scheduler import Scheduler
from tests.support.costly_guides import Clock, CostlyGuide
from tests.support.scheduler_steps import request

LIMIT = 10.0


class Load:
    """A scheduler whose steps may spend LIMIT seconds on masks, and how often each sequence sampled."""

    def __init__(self, **options):
        options = {"max_num_seqs": 32, "max_num_batched_tokens": 512} | options
        self.clock = Clock()
        blocks = BlockManager(options.pop("num_blocks", 512), BlockLayout(4))
        self.sched = Scheduler(blocks, mask_budget=MaskBudget(LIMIT, self.clock), **options)
        self.counts = Counter()
        self.costs = []  # of the masks in each step

    def add(self, key, *seconds, progress=None, **options):
        """Add a request with a guide for each of its samples, or without guides."""
        guides = tuple(CostlyGuide(self.clock, cost) for cost in seconds)
        one = request(key, prompt=3, n=max(1, len(guides)), **{"max_tokens": 20} | options)
        self.sched.add(replace(one, guides=guides, progress=progress))

    def step(self):
        """Run a step, and return the keys of the requests that sample in it, with one entry for each sample."""
        began, plan = self.clock.now, self.sched.schedule()
        self.costs.append(self.clock.now - began)
        self.sched.check()
        sampled = [one for chunk in plan.chunks for one in chunk.sampled_sequences] if plan else []
        if plan:
            self.sched.commit(plan, StepResult.of_tokens([1] * len(sampled)))
            self.sched.check()
        self.counts.update((one.key, one.index) for one in sampled)
        return [one.key for one in sampled]

    def steps(self, count):
        return [self.step() for _ in range(count)]

    def run(self):
        """Run until all requests have ended, and return the number of tokens of each sample."""
        while self.sched.has_work:
            self.step()
        return self.counts


def test_expensive_guides_take_turns_and_others_run_in_every_step():
    load = Load()
    load.add(8, 0.1, max_tokens=100)
    load.add(9, max_tokens=100)
    load.steps(2)
    for key in range(8):
        load.add(key, 50.0)
    assert sorted(load.step()) == list(range(10))  # the first token needs no mask
    for _ in range(3):
        rounds = load.steps(8)
        assert all({8, 9} < set(keys) and len(keys) == 3 for keys in rounds)
        assert Counter(key for keys in rounds for key in keys if key < 8) == dict.fromkeys(range(8), 1)
    assert max(load.costs) <= LIMIT + 50
    assert load.run() == {(key, 0): 20 if key < 8 else 100 for key in range(10)}


def test_a_cheap_guide_that_joins_expensive_ones_does_not_wait():
    load = Load()
    for key in range(8):
        load.add(key, 50.0)
    load.steps(9)
    load.add(8, 0.1)
    assert all(8 in keys for keys in load.steps(20))


def test_guides_that_become_expensive_at_once_exceed_the_limit_once_per_step():
    load = Load()
    for key in range(8):
        load.add(key, lambda seen: 50.0 if seen == 5 else 0.1)
    load.add(8)
    assert load.run() == dict.fromkeys([(key, 0) for key in range(9)], 20)
    assert max(load.costs) <= LIMIT + 50


def test_ordinary_guides_all_run_in_every_step():
    load = Load()
    for key in range(20):
        load.add(key, 0.4)
    assert all(len(keys) == 20 for keys in load.steps(20))


def test_equal_guides_that_exceed_the_limit_together_get_equal_shares():
    load = Load()
    for key in range(20):
        load.add(key, 1.0)
    load.step()
    load.steps(10)
    assert set(load.counts.values()) == {1 + 5}
    assert max(load.costs) <= LIMIT


def test_expensive_guides_of_higher_priority_come_first():
    load = Load()
    load.add(4, 0.1, priority=2, max_tokens=100)
    load.steps(2)
    for key, priority in enumerate([1, 0, 1, 0]):
        load.add(key, 50.0, priority=priority, max_tokens=6)
    rounds = load.steps(30)
    assert all(4 in keys for keys in rounds)
    last = {key: index for index, keys in enumerate(rounds) for key in keys}
    assert max(last[1], last[3]) < min(last[0], last[2])
    assert [load.counts[(key, 0)] for key in range(4)] == [6] * 4


def test_samples_of_a_request_take_turns():
    load = Load()
    load.add(0, 0.1, 50.0, 50.0)
    load.add(1)
    load.steps(11)
    assert load.counts == {(0, 0): 11, (0, 1): 6, (0, 2): 6, (1, 0): 11}
    assert load.run() == {(0, 0): 20, (0, 1): 20, (0, 2): 20, (1, 0): 20}


@pytest.mark.parametrize("n", [1, 4])
def test_moved_requests_wait_for_their_masks_before_admission(n):
    """Requests that have output already, whose guides begin anew. Their masks delay no running request."""
    load = Load()
    load.add(9, max_tokens=40)
    load.step()
    for key in range(4):
        load.add(key, *[50.0] * n, progress=Progress(((1, 1),) * n, False, None, b""), max_tokens=6)
    rounds = load.steps(30)
    assert all(9 in keys for keys in rounds)
    assert max(load.costs) <= 2 * (LIMIT + 50)
    load.run()
    assert [load.counts[(key, index)] for key in range(4) for index in range(n)] == [4] * 4 * n


def test_preempted_requests_finish():
    load = Load(num_blocks=14)
    for key in range(6):
        load.add(key, 50.0 if key % 2 else 0.1)
    assert load.run() == dict.fromkeys([(key, 0) for key in range(6)], 20)
    assert load.sched.stats.preemptions > 0


def test_stages_take_turns_as_well():
    load = Load(stages=2)
    for key in range(4):
        load.add(key, 50.0, max_tokens=8)
    load.add(4, 0.1, max_tokens=8)
    sched, flights, outputs = load.sched, [], Counter()
    while sched.has_work:
        before = load.clock.now
        plan = sched.schedule()
        assert load.clock.now - before <= LIMIT + 50
        sched.check()
        flights += [plan] if plan else []
        if flights and (plan is None or len(flights) > 1):
            oldest = flights.pop(0)
            result = StepResult.of_tokens(1 for chunk in oldest.chunks for _ in chunk.sampled_sequences)
            outputs.update(delta.key for delta in sched.commit(oldest, result))
    assert outputs == dict.fromkeys(range(5), 8)
