"""Adapter slots: assignment, eviction, loads, and preemption for a slot."""

import random

import pytest

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.request import Adapter, GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.kv.blocks import BlockManager
from paged_backend.scheduling.adapter_slots import AdapterLoad, AdapterSlots
from paged_backend.scheduling.plan import StepResult
from paged_backend.scheduling.scheduler import Scheduler


def adapter(name):
    return Adapter(name, name.encode(), 1, {})


def request(key, name=None, length=4, **sampling):
    made = GenerateRequest(key, tuple(range(length)), SamplingParams(**sampling), 0, frozenset())
    object.__setattr__(made, "adapter", adapter(name) if name else None)
    return made


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 5])
def test_random_acquire_and_release_keep_slots_consistent(seed, count):
    """The device holds the adapters of the slots if every load is done before it is used."""
    rnd, slots, device, running = random.Random(seed), AdapterSlots(count), {}, []
    for key in range(500):
        wanted = request(key, rnd.choice("abcdefg"))
        in_use = {one.adapter.digest for one in running}
        assert slots.has_room(wanted.adapter) == (wanted.adapter.digest in in_use or len(in_use) < count)
        if slots.has_room(wanted.adapter) and rnd.random() < 0.6:
            slots.acquire(wanted.adapter)
            running.append(wanted)
        elif running:
            slots.release(running.pop(rnd.randrange(len(running))).adapter)
        if rnd.random() < 0.7:  # a step, which may fail
            loads = slots.take_loads()
            for load in loads:
                device.pop(load.slot, None)
            if rnd.random() < 0.2:
                slots.fail(loads)
            else:
                device |= {load.slot: load.adapter.digest for load in loads}
                used = slots.slots_of(running)
                assert used == {one.adapter.digest: used[one.adapter.digest] for one in running}
                waiting = {load.adapter.digest for load in slots._loads.values()}
                assert all(device[slot] == digest for digest, slot in used.items() if digest not in waiting)
        slots.check(running)
        assert {one.digest for one in slots.resident} >= {one.adapter.digest for one in running}
    assert AdapterSlots(0).slots_of([request(0)]) == {}


def test_least_recently_used_adapter_is_evicted():
    slots = AdapterSlots(2)
    for name in "abab":
        slots.acquire(adapter(name))
        slots.release(adapter(name))
    slots.acquire(adapter("a"))
    slots.release(adapter("a"))
    slots.take_loads()
    slots.acquire(adapter("c"))
    assert slots.take_loads() == (AdapterLoad(1, slots.resident[-1]),)
    assert sorted(one.name for one in slots.resident) == ["a", "c"]


def scheduler(**options):
    blocks = BlockManager(64, BlockLayout(4), caching=True)
    return Scheduler(blocks, **{"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_loras": 1} | options)


def test_failed_step_reloads_its_adapters():
    sched = scheduler()
    sched.add(request(0, "a"))
    plan = sched.schedule()
    assert [load.adapter.name for load in plan.loads] == ["a"]
    assert plan.adapters == {b"a": 0}
    assert len(sched.fail(plan, "no")) == 1
    sched.check()
    sched.add(request(1, "a"))
    plan = sched.schedule()
    assert [load.adapter.name for load in plan.loads] == ["a"]
    sched.commit(plan, StepResult.of_tokens([5]))
    plan = sched.schedule()
    assert plan.loads == () and plan.adapters == {b"a": 0}
    sched.abort(1)
    sched.commit(plan, StepResult.of_tokens([5]))
    sched.check()


def test_plan_without_adapters_has_no_adapter_slots():
    sched = scheduler()
    for key, name in enumerate([None, "a"]):
        sched.add(request(key, name, max_tokens=1 + key))
    plan = sched.schedule()
    assert plan.adapters == {b"a": 0}
    sched.commit(plan, StepResult.of_tokens([5, 6]))
    sched.commit(sched.schedule(), StepResult.of_tokens([7]))
    sched.add(request(2))
    assert sched.schedule().adapters == {}


def test_adapter_requests_do_not_overtake_one_waiting_for_a_slot():
    """Otherwise requests that share the slot in use could keep it for ever. Requests without an adapter do overtake."""
    sched = scheduler()
    sched.add(request(0, "a", max_tokens=2))
    sched.commit(sched.schedule(), StepResult.of_tokens([5]))
    for key, name in ((1, "b"), (2, "a"), (3, None)):
        sched.add(request(key, name, max_tokens=4))
    plan = sched.schedule()
    assert [chunk.sequence.key for chunk in plan.chunks] == [0, 3]
    sched.commit(plan, StepResult.of_tokens([5, 5]))  # ends the first request
    plan = sched.schedule()
    assert [chunk.sequence.key for chunk in plan.chunks] == [3, 1]
    assert [load.adapter.name for load in plan.loads] == ["b"]
    sched.check()


def run(sched):
    """Run one step and return the keys of the requests that computed."""
    plan = sched.schedule()
    sched.check()
    sched.commit(plan, StepResult.of_tokens([5 for chunk in plan.chunks for _ in chunk.sampled_sequences]))
    sched.check()
    return {chunk.sequence.key for chunk in plan.chunks}


def at_work(*asked, **options):
    """Return a scheduler in which requests with these (adapter, priority) run."""
    sched = scheduler(**options)
    for key, (name, priority) in enumerate(asked):
        sched.add(request(key, name, priority=priority))
    assert run(sched) == set(range(len(asked)))
    return sched


@pytest.mark.parametrize(
    ("running", "left"),
    [
        ([("a", 3)], []),
        ([("a", 3), (None, 9)], [1]),  # a request without an adapter holds no slot
        ([("a", 3), ("b", 5)], [0]),
        ([("a", 5), ("b", 3)], [1]),
        ([("a", 5), ("b", 5)], [0]),  # of equal priorities the newest
        ([("a", 5), ("a", 5), ("b", 5)], [0, 1]),  # the adapter with fewer users
        ([("a", 9), ("a", 3), ("b", 5)], [0, 1]),  # one slot is also used by a higher priority
        ([("a", 9), ("a", 5), ("b", 3)], [2]),
    ],
)
def test_higher_priority_preempts_all_users_of_one_slot(running, left):
    sched = at_work(*running, max_loras=len({name for name, _ in running if name}))
    new = len(running)
    sched.add(request(new, "new", priority=1, max_tokens=2))
    assert run(sched) == {*left, new}
    assert sched.stats.preemptions == len(running) - len(left)
    while sched.has_work:
        run(sched)
    assert sched.stats.preemptions == len(running) - len(left), "a resumed request preempts no other"


@pytest.mark.parametrize(
    ("running", "options"),
    [
        ([("a", 1)], {}),  # equal priority
        ([("a", 9), ("a", 1)], {}),  # a lower priority, whose slot an equal priority also uses
        ([("a", 1), ("b", 0), (None, 9)], {"max_loras": 2}),
        ([("a", 9), (None, 1)], {"max_num_seqs": 2, "samples": 2}),  # the new request would not fit afterwards either
    ],
)
def test_no_preemption_that_would_not_free_a_usable_slot(running, options):
    samples = options.pop("samples", 1)
    sched = at_work(*running, **options)
    sched.add(request(8, "new", priority=1, n=samples))
    assert run(sched) == set(range(len(running)))
    assert sched.stats.preemptions == 0


def test_request_in_flight_is_preempted_after_commit():
    sched = at_work(("a", 3))
    first = sched.schedule()
    sched.add(request(1, "new"))
    second = sched.schedule()
    assert {chunk.sequence.key for chunk in second.chunks} == {0}
    assert sched.needs_results
    for plan in (first, second):
        sched.commit(plan, StepResult.of_tokens([5]))
    assert run(sched) == {1}


@pytest.mark.parametrize("seed", range(20))
def test_random_priorities_and_adapters_answer_every_request(seed):
    """A request waits for a slot only if no adapter has only users of lower priority."""
    rnd = random.Random(seed)
    sched = scheduler(max_loras=rnd.choice([1, 2]), max_num_batched_tokens=128)
    asked, answered = 0, []
    while asked < 40 or sched.has_work:
        if asked < 40 and rnd.random() < 0.5:
            name, priority, length = rnd.choice(["a", "b", "c", None]), rnd.choice([0, 1, 2]), rnd.randint(1, 12)
            sched.add(request(asked, name, length, priority=priority, max_tokens=rnd.randint(1, 8)))
            asked += 1
        if plan := sched.schedule():
            sched.check()
            waiting = (one for one in sched.waiting if one.request.adapter)
            if first := min(waiting, key=lambda one: one.priority, default=None):
                first_users = {}
                for one in sched.running:
                    first_users.setdefault(one.request.adapter.digest, one) if one.request.adapter else None
                assert all(one.priority <= first.priority for one in first_users.values())
            deltas = sched.commit(
                plan, StepResult.of_tokens([5 for chunk in plan.chunks for _ in chunk.sampled_sequences])
            )
            answered += [delta.key for delta in deltas if delta.finish]
    assert sorted(answered) == list(range(40))
