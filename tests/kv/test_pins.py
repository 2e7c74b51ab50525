"""Pins: the blocks of a session stay between its turns, until a request needs them."""

from paged_backend.api.block_layout import FULL, WindowKind
from tests.support.scheduler_stress import request, scheduler
from tests.support.shadow import ShadowStore


def finish_with_pins(sched, store, one):
    sched.add(one)
    outputs = {}
    while sched.has_work:
        plan = sched.schedule()
        for delta in sched.commit(plan, store.run(plan)):
            outputs.setdefault((delta.key, delta.sample), []).extend(delta.token_ids)
        sched.check()
    return outputs


def test_session_pins_blocks_between_turns():
    """Other requests fill the pool with cached blocks; without pins, those of the session would be evicted."""
    sched = scheduler(num_blocks=16, session_pages=8)
    store = ShadowStore(sched, 97)
    first = request(0, range(100, 117), max_tokens=5, session="chat")
    answer = finish_with_pins(sched, store, first)[0, 0]
    assert sched.stats.blocks_pinned == sched.blocks.num_used == 5
    for key in range(1, 6):
        finish_with_pins(sched, store, request(key, range(200 * key, 200 * key + 40)))
    cached = sched.stats.cached_tokens
    finish_with_pins(sched, store, request(9, [*first.prompt_token_ids, *answer, 7, 7], session="chat"))
    assert sched.stats.cached_tokens - cached >= 20
    sched.pins.drop("chat")
    sched.check()
    assert sched.blocks.num_used == 0


def test_pin_limit_unpins_least_recently_used_session():
    sched = scheduler(num_blocks=32, session_pages=8)
    store = ShadowStore(sched, 97)
    for key, name in enumerate("abca"):
        finish_with_pins(sched, store, request(key, range(100 * key, 100 * key + 12), max_tokens=1, session=name))
    assert sched.stats.blocks_pinned == 6
    held = sched.blocks.num_used
    sched.pins.drop("b")
    assert sched.blocks.num_used == held


def test_sessions_are_unpinned_before_preemption():
    sched = scheduler(num_blocks=8, session_pages=8)
    store = ShadowStore(sched, 97)
    finish_with_pins(sched, store, request(0, range(100, 116), max_tokens=1, session="chat"))
    assert sched.stats.blocks_pinned == 4
    finish_with_pins(sched, store, request(1, range(200, 212), max_tokens=18))
    assert sched.stats.blocks_pinned == 0
    assert sched.stats.preemptions == 0


def test_sessions_are_unpinned_before_lower_priority_is_preempted():
    """A request takes the blocks of idle sessions, not those of a running request of lower priority."""
    sched = scheduler(num_blocks=12, session_pages=8)
    store = ShadowStore(sched, 97)
    finish_with_pins(sched, store, request(0, range(100, 124), max_tokens=1, session="chat"))
    sched.add(request(1, range(200, 206), max_tokens=3, priority=5))
    plan = sched.schedule()
    sched.commit(plan, store.run(plan))
    finish_with_pins(sched, store, request(2, range(300, 320), max_tokens=1))
    assert sched.stats.blocks_pinned == 0
    assert sched.stats.preemptions == 0


def test_session_pins_do_not_block_request_needing_whole_pool():
    sched = scheduler(num_blocks=8, session_pages=8)
    store = ShadowStore(sched, 97)
    finish_with_pins(sched, store, request(0, range(100, 116), max_tokens=1, session="chat"))
    assert finish_with_pins(sched, store, request(1, range(200, 232), max_tokens=1))


def test_pool_map_shows_blocks_only_pinned_by_sessions():
    sched = scheduler(num_blocks=8, session_pages=8)
    store = ShadowStore(sched, 97)
    finish_with_pins(sched, store, request(0, range(100, 108), max_tokens=1, session="chat"))
    assert sorted(sched.blocks.pool.map(sched.pins.counts)) == sorted("pp......")
    sched.add(request(1, [*range(100, 108), 5, 6], session="chat"))
    sched.schedule()
    assert sorted(sched.blocks.pool.map(sched.pins.counts)) == sorted("221.....")


def test_pages_of_all_kinds_are_pinned_and_counted_once():
    """Of the window, only the block that the next turn reads, of two pages."""
    sched = scheduler(num_blocks=32, session_pages=12, kinds=(FULL, WindowKind(2, window=4)))
    store = ShadowStore(sched, 97)
    for key, name in enumerate("ab"):  # of the same tokens
        finish_with_pins(sched, store, request(key, range(100, 117), max_tokens=1, session=name))
    assert sched.stats.blocks_pinned == sched.blocks.num_used == 4 + 2
    assert sched.blocks.pool.map(sched.pins.counts).count("p") == 6
    finish_with_pins(sched, store, request(2, range(200, 228), max_tokens=1, session="c"))
    assert sched.stats.blocks_pinned == 7 + 2  # with those of the other sessions it would be 15
    sched.pins.drop("c")
    assert sched.blocks.num_used == 0
