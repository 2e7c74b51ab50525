"""Which prompt log probabilities are taken from cached blocks, and which positions are computed."""

from dataclasses import replace

import pytest

from paged_backend.api.request import Adapter
from paged_backend.scheduling.group import Group
from tests.support.scheduler_stress import empty, request, scheduler
from tests.support.shadow import ShadowStore, expected_scores

PROMPT = tuple(token % 3 for token in range(19))  # of blocks of four tokens
VOCAB = 5


class Engine:
    """A scheduler and a model, with costs that make copying a block free."""

    def __init__(self, *, keeps_scores=True, **options):
        self.sched = scheduler(**{"num_blocks": 64, "keeps_scores": keeps_scores} | options)
        self.store = ShadowStore(self.sched, VOCAB)
        self.next_key = 0

    def score(self, prompt=PROMPT, **options):
        """Run a request. Check its log probabilities, and return the positions that were computed for them."""
        options = {"prompt_logprobs": 0, "max_tokens": 1} | options
        one = replace(request(self.next_key, prompt, **options), returns_usage=True)
        self.next_key += 1
        self.sched.add(one)
        positions, found = [], []
        while self.sched.has_work:
            plan = self.sched.schedule()
            positions += [position for chunk in plan.chunks for position in chunk.scored]
            found += self.sched.commit(plan, self.store.run(plan))
            self.sched.check()
        self.others = [delta for delta in found if delta.key != one.key]
        found = [delta for delta in found if delta.key == one.key]
        (prompt_delta,) = [delta for delta in found if delta.prompt_values is not None]
        assert prompt_delta is found[0]
        assert prompt_delta.prompt_values == expected_scores(one, VOCAB)
        self.cached = found[-1].usage.cached_tokens
        return positions


@pytest.mark.parametrize(
    ("length", "first", "cached"),
    [  # the last position of the cached blocks chooses the token after them
        (19, 15, 15),
        (17, 15, 15),
        (16, None, 15),  # all tokens are in cached blocks: only the last position is computed, to sample from it
        (15, 11, 11),
        (5, 3, 3),
        (3, 0, 0),
    ],
)
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_positions_after_the_cached_blocks_are_computed(length, first, cached, max_tokens):
    engine, prompt = Engine(), PROMPT[:length]
    assert engine.score(prompt) == list(range(length - 1))
    assert engine.score(prompt, max_tokens=max_tokens) == ([] if first is None else list(range(first, length - 1)))
    assert engine.cached == cached


@pytest.mark.parametrize("options", [{"keeps_scores": False}, {"caching": False}])
def test_nothing_is_taken_unless_scores_are_kept(options):
    engine = Engine(**options)
    assert engine.score() == engine.score() == list(range(18))


def test_blocks_of_requests_without_scores_have_none():
    engine = Engine()
    for key in (100, 101):
        engine.sched.add(request(key, PROMPT[:12]))
        while engine.sched.has_work:
            plan = engine.sched.schedule()
            engine.sched.commit(plan, engine.store.run(plan))
    assert engine.score() == list(range(18))
    assert engine.score() == [15, 16, 17]


def test_other_continuations_take_the_scores_of_their_prefix():
    engine = Engine()
    engine.score()
    assert engine.score((*PROMPT[:9], 4, 4, 4)) == [7, 8, 9, 10]
    assert engine.score((4, *PROMPT[1:])) == list(range(18))


def test_scores_need_enough_top_tokens_and_fingerprints():
    engine = Engine()
    engine.score(prompt_logprobs=1)
    assert engine.score(prompt_logprobs=0) == engine.score(prompt_logprobs=1) == [15, 16, 17]
    assert engine.score(prompt_logprobs=2) == list(range(18))
    assert engine.score(prompt_logprobs=2) == [15, 16, 17]
    assert engine.score(prompt_logprobs=1, logits_digest=True) == list(range(18))
    assert engine.score(prompt_logprobs=2, logits_digest=True) == [15, 16, 17]


def test_scores_are_not_shared_between_tenants_or_adapters():
    engine = Engine(loras=2)
    adapters = [Adapter(name, name.encode(), 1, {}) for name in "xy"]
    cases = [{}, {"cache_salt": "other"}, *({"adapter": adapter} for adapter in adapters)]
    assert [engine.score(**case) for case in cases] == [list(range(18))] * 4
    assert [engine.score(**case) for case in cases] == [[15, 16, 17]] * 4


@pytest.mark.parametrize("forget", [lambda sched: empty(sched.blocks), lambda sched: sched.clear_cache()])
def test_scores_are_dropped_with_their_blocks(forget):
    engine = Engine()
    engine.score()
    assert len(engine.sched.blocks.pool.indexes[0].scores) == 4
    forget(engine.sched)
    assert not engine.sched.blocks.pool.indexes[0].scores
    assert engine.score() == list(range(18))


def test_blocks_on_the_host_have_no_scores():
    """The keys and values of the prefix come from the host, but its log probabilities are computed again."""
    engine = Engine(host=64)
    engine.score()
    empty(engine.sched.blocks)
    assert engine.score() == list(range(18)) and engine.cached == 0
    assert engine.score() == [15, 16, 17]


def test_scores_taken_before_their_blocks_are_evicted_stay_valid():
    """The prompt is computed again, but no position is scored twice."""
    engine = Engine(num_blocks=8, max_num_seqs=2)
    engine.score()
    engine.sched.add(request(100, [3] * 20, max_tokens=12))
    engine.sched.add(request(101, PROMPT, max_tokens=4, prompt_logprobs=0))
    scored, found = [], []
    while engine.sched.has_work:
        plan = engine.sched.schedule()
        scored += [position for chunk in plan.chunks for position in chunk.scored]
        found += engine.sched.commit(plan, engine.store.run(plan))
    (delta,) = [delta for delta in found if delta.prompt_values is not None]
    assert delta.prompt_values == expected_scores(request(101, PROMPT, prompt_logprobs=0), VOCAB)
    assert scored == list(range(11, 18))  # the fourth block is evicted at once, the others while the request waits
    assert engine.sched.stats.cached_tokens == 0


def test_preempted_request_scores_no_position_twice():
    engine = Engine(num_blocks=10, preemption="recompute", max_num_batched_tokens=8)
    low = request(100, PROMPT, max_tokens=8, prompt_logprobs=0, priority=1)
    engine.sched.add(low)
    scored, found = [], []
    for number in range(60):
        if number == 1:
            engine.sched.add(request(101, [3] * 24, max_tokens=8))
        plan = engine.sched.schedule()
        if plan:
            scored += [position for chunk in plan.chunks for position in chunk.scored]
            found += engine.sched.commit(plan, engine.store.run(plan))
    assert not engine.sched.has_work and engine.sched.stats.recomputed
    assert scored == list(range(18))
    assert engine.score() == [15, 16, 17]


def test_preempted_request_takes_the_rest_of_a_block_from_the_cache():
    """It has computed one of the four scores of its last full block; a request for the same prompt computes all."""
    engine = Engine(num_blocks=6, preemption="recompute", max_num_batched_tokens=12, max_num_seqs=2)
    preempted = request(100, PROMPT, max_tokens=0, prompt_logprobs=0, priority=1)
    engine.sched.add(preempted)
    plan = engine.sched.schedule()
    engine.sched.commit(plan, engine.store.run(plan))
    assert engine.score(priority=-1) == [*range(11, 18), 15, 16, 17]
    assert engine.others[0].prompt_values == expected_scores(preempted, VOCAB)


def test_scores_are_stored_if_the_last_token_has_a_step_of_its_own():
    engine = Engine(max_num_batched_tokens=15)
    assert engine.score(PROMPT[:16], max_tokens=0) == list(range(15))
    assert engine.score(PROMPT[:16]) == []


def test_prompt_tokens_that_are_scored_are_not_taken_from_the_cache():
    """The cache has no logits: the first token without log probabilities after it has to be computed."""
    group = Group(request(0, range(6), prompt_logprobs=0))
    assert (group.unscored(0, 6), group.max_cacheable_tokens) == (range(5), 1)
    group.prompt_values["logprobs"] += [()] * 3
    assert (group.unscored(0, 6), group.unscored(4, 5), group.max_cacheable_tokens) == (range(3, 5), range(4, 5), 4)
    group.prompt_values["logprobs"] += [()] * 2
    assert (len(group.unscored(0, 6)), group.max_cacheable_tokens) == (0, 6)
    assert Group(request(0, range(6))).max_cacheable_tokens == 6
