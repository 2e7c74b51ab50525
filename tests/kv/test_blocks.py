"""The block manager: block tables of all kinds of layers, prefix hits, forks, copies on write, and what is freed."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.api.block_layout import FULL, EdgeKind, WindowKind
from paged_backend.api.request import Origin
from paged_backend.kv.blocks import NO_BLOCKS, NO_HIT
from paged_backend.kv.content import BlockKey, BlockScores
from paged_backend.kv.pages import NULL
from tests.support.block_managers import cached, compute, manager, sequence
from tests.support.scheduler_stress import snapshot
from tests.support.shadow import FirstOfStride, is_seen

WINDOW = WindowKind(2, window=6)
KINDS = [(FULL,), (WindowKind(1, 3),), (FULL, WindowKind(1, 5)), (WindowKind(2, 4), FULL, FirstOfStride(1, stride=8))]
KINDS.append((FULL, EdgeKind(2)))


def known(blocks, tokens):
    """Return how many full blocks of these tokens are a hit, if one more token follows them."""
    return blocks.match(sequence(blocks, [*tokens, -1]), len(tokens) + 1).num_blocks


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]), st.sampled_from(KINDS), st.sampled_from([0, 12]))
def test_match_finds_the_longest_cached_prefix(seed, size, kinds, host):
    """Compared with all cached prefixes, one by one, while blocks of all kinds are evicted."""
    rnd, held, past = random.Random(seed), [], [[0]]
    blocks = manager(40, size, kinds, host=host)
    for _ in range(30):
        begins = rnd.choice(past)[: rnd.randint(0, 12)]
        tokens = [*begins, *(rnd.randrange(2) for _ in range(rnd.randint(1, 12)))]
        past.append(tokens)
        one = sequence(blocks, tokens, salt=rnd.choice("ab"))
        hit = blocks.match(one, len(tokens))
        count, partial = longest(blocks, one)
        assert hit.num_blocks == count
        assert hit.partial_tokens == partial or (len(kinds) > 1 and hit.partial_tokens < partial)
        if blocks.pages_to_admit([one], hit) + blocks.pages_to_copy_partial(hit) <= blocks.pool.num_available:
            blocks.adopt(one, hit)
            if compute(blocks, one):
                held.append(one)
            else:
                blocks.free(one)
        blocks.check(held)
        while held and rnd.random() < 0.5:
            blocks.free(held.pop(rnd.randrange(len(held))))
            blocks.check(held)


def longest(blocks, one):
    """Return the full blocks and the further tokens of the longest cached prefix, by brute force."""
    size, kinds, tokens, origin = blocks.block_size, blocks.layout.kinds, one.tokens, one.request.origin
    pools = [pool for pool in (blocks.pool, blocks.host) if pool]
    prefixes = [
        [pool.indexes[kind].entry(block).prefix for pool in pools for block in pool.indexes[kind].blocks]
        for kind in range(len(kinds))
    ]

    def is_hit(count):
        return all(
            (origin, tokens[: (at + 1) * size]) in prefixes[place]
            for place, kind in enumerate(kinds)
            for at in range(count)
            if any(is_seen(kind, position, count * size, size) for position in range(at * size, (at + 1) * size))
        )

    count = max(count for count in range((len(tokens) - 1) // size + 1) if is_hit(count))
    start = count * size
    rest = tokens[start : min(start + size, len(tokens) - 1)]
    children = [prefix for prefix in prefixes[0] if all(prefix in others for others in prefixes)]
    children = [content[start:] for of, content in children if of == origin and content[:start] == tokens[:start]]
    return count, max((common(child, rest) for child in children if len(child) <= size), default=0)


def common(first, second):
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def test_without_caching_nothing_is_a_hit():
    blocks = manager(8, caching=False)
    blocks.free(cached(blocks, range(8)))
    assert blocks.match(sequence(blocks, range(8)), 8) is NO_HIT
    assert (blocks.pool.num_used, blocks.pool.num_cached) == (0, 0)


def test_a_hit_leaves_a_token_to_compute():
    blocks = manager(8)
    blocks.free(cached(blocks, range(8)))
    hit = blocks.match(sequence(blocks, range(8)), 8)
    assert (hit.num_blocks, hit.partial_tokens) == (1, 3)
    hit = blocks.match(sequence(blocks, range(9)), 9)
    assert (hit.num_blocks, hit.partial_tokens) == (2, 0)


def test_a_hit_needs_the_blocks_in_the_window_only():
    """Of the last six tokens: two blocks of four, whatever becomes of those before them."""
    blocks = manager(60, kinds=(FULL, WINDOW))
    one = cached(blocks, range(24))
    assert [block == NULL for block in one.tables[1]] == [True] * 4 + [False] * 2
    assert known(blocks, range(12)) == 3
    forget(blocks, range(24), 0, kind=1)
    assert known(blocks, range(12)) == 3  # the query after them sees blocks 1 and 2
    forget(blocks, range(24), 2, kind=1)
    assert known(blocks, range(12)) == 0  # the shorter prefixes need block 0
    assert known(blocks, range(24)) == 6
    hit = blocks.match(sequence(blocks, range(25)), 25)
    assert [location and location.block for location in hit.tables[1]] == [None] * 4 + one.tables[1][4:]
    follower = sequence(blocks, range(25))
    blocks.adopt(follower, hit)
    assert follower.tables == one.tables
    blocks.check([one, follower])
    forget(blocks, range(24), 5, kind=0)
    assert known(blocks, range(24)) == 5


def forget(blocks, tokens, index, kind):
    """Remove the content of a block from the prefix cache."""
    one = sequence(blocks, tokens)
    block = blocks.pool.find(blocks.entry(one, index), kind)
    assert block is not None
    blocks.pool.forget(block)


def test_a_partial_hit_needs_its_block_in_all_kinds():
    blocks = manager(60, kinds=(FULL, WINDOW))
    blocks.free(cached(blocks, range(8)))
    other = [0, 1, 2, 3, 4, 5, 90, 91]
    hit = blocks.match(sequence(blocks, other), 8)
    assert (hit.num_blocks, hit.partial_tokens, len(hit.partial)) == (1, 2, 2)
    forget(blocks, range(8), 1, kind=1)
    hit = blocks.match(sequence(blocks, other), 8)
    assert (hit.num_blocks, hit.partial_tokens, hit.partial) == (1, 0, ())


@pytest.mark.parametrize(
    "kinds", [(FirstOfStride(stride=64),), (FULL, FirstOfStride(2, stride=64), WindowKind(1, 100))]
)
def test_a_sequence_holds_the_blocks_that_are_needed(kinds):
    """After every step, and never more than the layout says."""
    blocks = manager(1000, 16, kinds, caching=False)
    one = sequence(blocks, range(2000))
    for end in (*range(0, 1500, 40), *range(1500, 2000)):
        assert blocks.pages_to_admit([one], NO_HIT) <= blocks.layout.pages_for([2000], [2000], 0)
        assert blocks.extend(one, end)
        assert blocks.num_used <= blocks.layout.pages_for([end], [40], 0)
        one.computed = end
        blocks.commit(one, end)
        blocks.check([one])
        for kind, table in zip(kinds, one.tables, strict=True):
            held = [at for at, block in enumerate(table) if block != NULL]
            assert held == [*kind.needed(end // 16, 16), *range(end // 16, -(-end // 16))]
    strided = next(table for kind, table in zip(kinds, one.tables, strict=True) if isinstance(kind, FirstOfStride))
    assert [at for at, block in enumerate(strided) if block != NULL] == [*range(0, 124, 4), 124]


def test_a_pool_without_room_for_all_blocks_serves_a_long_sequence():
    blocks = manager(8, kinds=(WindowKind(1, window=6),), caching=False)
    one = sequence(blocks, range(400))
    for end in range(8, 400, 8):
        assert blocks.extend(one, end)
        one.computed = end
        blocks.commit(one, end)
        blocks.check([one])
    assert blocks.num_used == 2


def test_extend_gives_each_kind_its_blocks():
    blocks = manager(12, kinds=(FULL, WINDOW))
    one = sequence(blocks, range(9))
    assert blocks.extend(one, 5) == (2, 0)
    assert blocks.extend(one, 8) == NO_BLOCKS
    assert blocks.extend(one, 9) == (1, 0)
    assert [len(table) for table in one.tables] == [3, 3]
    assert len({page for table in one.tables for block in table for page in blocks.pool.pages_of(block)}) == 9
    before = snapshot(blocks)
    assert blocks.extend(one, 17) is None  # six pages; three are left
    assert snapshot(blocks) == before
    assert blocks.extend(one, 13) == (1, 0)


def test_a_shared_block_is_copied_before_it_is_written():
    """The last block of the prompt, in each kind. Its source stays until the copy is made."""
    blocks = manager(12, kinds=(FULL, WINDOW))
    one, other = sequence(blocks, range(6)), sequence(blocks, range(6))
    assert blocks.extend(one, 6)
    one.computed = 6
    blocks.fork(one, other)
    assert other.tables == one.tables and other.tables[0] is not one.tables[0]
    assert blocks.pool.num_shared == 4
    shared = [table[1] for table in one.tables]
    assert blocks.extend(one, 7) == (1, 1)
    assert [table[0] for table in one.tables] == [table[0] for table in other.tables]
    assert [copy.source for copy in blocks.ledger.take().copies] == shared
    assert blocks.extend(other, 7) == NO_BLOCKS  # the block is its own now
    blocks.check([one, other])


def test_a_copy_needs_room_in_all_kinds():
    blocks = manager(8, kinds=(FULL, WINDOW))
    one, other = sequence(blocks, range(6)), sequence(blocks, range(6))
    assert blocks.extend(one, 6)
    one.computed = 6
    blocks.fork(one, other)
    before = snapshot(blocks)
    assert blocks.extend(one, 7) is None  # three pages; two are left
    assert snapshot(blocks) == before


def test_source_of_a_copy_is_referenced_until_copied():
    blocks = manager(3)
    one, other = sequence(blocks, range(3)), sequence(blocks, range(3))
    blocks.extend(one, 2)
    one.computed = 2
    blocks.fork(one, other)
    assert blocks.extend(one, 3) == (1, 1)
    blocks.free(other)
    assert blocks.pool.map() == "1.1"
    blocks.ledger.finish(blocks.ledger.take())
    assert blocks.pool.map() == "..1"


def test_source_of_a_partial_hit_is_not_evicted_for_its_copy():
    blocks = manager(5)
    blocks.free(cached(blocks, range(8)))
    one = sequence(blocks, [0, 1, 2, 3, 4, 5, 9, 9])
    hit = blocks.match(one, 8)
    blocks.pool.allocate(2)
    blocks.adopt(one, hit)
    (copy,) = blocks.ledger.take().copies
    assert copy.source == hit.partial[0].block != copy.target
    assert (one.computed, one.usage.reused, one.usage.new, one.usage.copied) == (6, 1, 1, 1)


def test_a_fork_has_the_contents_of_full_blocks():
    blocks = manager(8)
    one = cached(blocks, range(10))
    other = sequence(blocks, [*range(10), 7])
    blocks.fork(one, other)
    assert other.chain.entries == one.chain.entries[:2] and other.computed == other.committed == 10
    blocks.free(one)
    assert blocks.num_used == 3
    blocks.check([other])


def test_truncate_frees_the_blocks_of_rejected_tokens():
    blocks = manager(12, kinds=(FULL, WINDOW))
    one = sequence(blocks, range(5))
    assert blocks.extend(one, 5)
    one.usage.new = 2
    one.usage.new += blocks.extend(one, 13).new
    blocks.truncate(one, 6)
    assert (one.num_blocks, one.usage.new, blocks.num_used) == (2, 2, 6)


def test_restart_begins_with_the_first_token():
    blocks = manager(8)
    one = cached(blocks, range(10))
    blocks.restart(one)
    assert (one.num_blocks, one.computed, one.committed, blocks.num_used) == (0, 0, 0, 0)


def test_last_block_of_a_freed_sequence_is_cached_for_the_tokens_in_it():
    blocks = manager(8)
    blocks.free(cached(blocks, range(10)))
    assert (blocks.pool.num_cached, blocks.pool.num_used) == (3, 0)
    for tokens, partial in (([*range(10), 50], 2), ([*range(9), 50, 51], 1), ([*range(8), 50, 51], 0)):
        hit = blocks.match(sequence(blocks, tokens), len(tokens))
        assert (hit.num_blocks, hit.partial_tokens) == (2, partial)


def test_last_block_is_taken_over_by_the_sequence_that_continues_it():
    """A second one finds what the first left: the full blocks, and its own last block once it has ended."""
    blocks = manager(8)
    blocks.free(cached(blocks, range(10)))
    (one, other), last = (sequence(blocks, [*range(10), 50 + n, 60, 61]) for n in range(2)), 2
    hit = blocks.match(one, 13)
    assert blocks.takes_over_partial(hit) and blocks.pages_to_copy_partial(hit) == 0
    blocks.adopt(one, hit)
    assert (one.tables[0][last], one.usage.reused, one.usage.copied) == (hit.partial[0].block, 3, 0)
    assert blocks.ledger.num_copies == 0
    assert blocks.match(other, 13).partial_tokens == 0
    blocks.free(one)  # before a step
    blocks.adopt(one, blocks.match(one, 13))
    assert one.tables[0][last] == hit.partial[0].block
    assert compute(blocks, one)
    blocks.check([one])
    assert blocks.match(other, 13).partial_tokens == 2  # of the block that is full now
    assert not blocks.takes_over_partial(blocks.match(other, 13))
    blocks.free(one)
    blocks.check([])


def test_last_block_that_diverges_or_is_in_use_is_copied():
    blocks = manager(12)
    blocks.free(cached(blocks, range(11)))
    one = sequence(blocks, [*range(10), 50, 51])  # shares two of the three tokens in it
    assert not blocks.takes_over_partial(blocks.match(one, 12))
    blocks.adopt(one, blocks.match(one, 12))
    other = sequence(blocks, [*range(11), 50])  # shares all of them, while they are the source of the copy
    hit = blocks.match(other, 12)
    assert hit.partial_tokens == 3 and not blocks.takes_over_partial(hit)
    blocks.adopt(other, hit)
    assert blocks.ledger.num_copies == 2
    blocks.ledger.finish(blocks.ledger.take())
    blocks.check([one, other])


def test_last_block_is_not_cached_before_its_content_is_there():
    """The copy that fills it was planned, and taken back."""
    blocks = manager(12)
    blocks.free(cached(blocks, range(11)))
    one = sequence(blocks, [*range(10), 50, 51])
    hit = blocks.match(one, 12)
    blocks.adopt(one, hit)
    assert blocks.ledger.cancel(one.key)
    blocks.pool.forget(hit.partial[0].block)
    blocks.free(one)
    assert known(blocks, range(8)) == 2 and blocks.pool.num_cached == 2


def test_last_block_is_cached_once():
    blocks = manager(12)
    for count in (11, 10, 11):
        one = sequence(blocks, range(count))
        assert compute(blocks, one)
        blocks.free(one)
    assert blocks.pool.num_cached == 3


def test_last_block_that_another_sequence_shares_is_not_cached():
    """It could not be found by its further tokens later."""
    blocks = manager(12)
    one, other = cached(blocks, range(10)), sequence(blocks, range(10))
    blocks.fork(one, other)
    blocks.free(one)
    assert blocks.match(sequence(blocks, [*range(10), 50]), 11).partial_tokens == 0
    blocks.free(other)
    blocks.check([])


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, WindowKind(1, window=100))])
def test_invalidated_contents_are_found_nowhere(kinds):
    blocks = manager(16, kinds=kinds, host=16)
    one = cached(blocks, range(10))
    blocks.ledger.finish(blocks.spill(lambda key: True, 9))
    assert blocks.host.num_cached == 2 * len(kinds)
    blocks.invalidate(one)
    assert known(blocks, range(10)) == 0
    assert blocks.host.num_cached == 0 and not blocks.has_unspilled
    blocks.free(one)
    assert (blocks.pool.num_used, blocks.pool.num_cached) == (0, 0)


def test_full_blocks_leave_the_edges():
    """They are not cached either, as another kind keeps their content. Cached are the first block, which a hit needs,
    and a block that is not full."""
    blocks = manager(20, kinds=(FULL, EdgeKind(2)))
    one = cached(blocks, range(10))
    first, *others = one.tables[1]
    assert [block != NULL for block in others] == [False, True]
    assert blocks.num_used == 3 + 2 * 2 and blocks.pool.num_cached == 0
    blocks.free(one)
    assert (blocks.pool.num_used, blocks.pool.num_cached) == (0, 3 + 2 * 2)
    hit = blocks.match(sequence(blocks, [*range(10), 50]), 11)
    assert (hit.num_blocks, hit.partial_tokens, hit.tables[1]) == (2, 2, [(first, False), None])
    assert known(blocks, range(7)) == 1  # within a full block that has left, nothing is found
    assert blocks.match(sequence(blocks, [0, 1, 50]), 3).partial_tokens == 2
    blocks.pool.forget(first)
    assert known(blocks, range(10)) == 0


def test_clear_forgets_the_device_only():
    blocks = manager(8, host=8)
    blocks.free(cached(blocks, range(8)))
    blocks.ledger.finish(blocks.spill(lambda key: True, 9))
    blocks.clear()
    assert (blocks.pool.num_cached, blocks.host.num_cached, blocks.has_unspilled) == (0, 2, False)


def test_reserved_blocks_are_cached_once_they_are_filled():
    """As many as there is room for, of contents that neither pool has. The last are evicted first."""
    blocks = manager(8, kinds=(FULL, WINDOW), host=6)
    held, one = cached(blocks, range(4)), sequence(blocks, range(13))
    keys = [BlockKey(blocks.entry(one, index), kind) for index in range(3) for kind in (0, 1)]
    before = known(blocks, range(12))
    reserved = blocks.reserve(keys)
    assert list(reserved) == keys[2:5]  # the third block lacks two pages for its other kind
    assert known(blocks, range(12)) == before == 1
    blocks.insert(reserved)
    assert known(blocks, range(12)) == 2
    assert blocks.locate(keys[4]) == (reserved[keys[4]], False)
    assert blocks.locate(keys[5]) is None
    blocks.check([held])


def test_scores_stay_until_their_block_leaves_the_device():
    blocks = manager(8)
    one = cached(blocks, range(8))
    scores = BlockScores({})
    assert blocks.find_scores(one, 1) is None
    blocks.add_scores(one, 1, scores)
    assert blocks.find_scores(one, 1) is scores
    assert blocks.find_scores(sequence(blocks, range(8)), 1) is scores
    blocks.free(one)
    blocks.pool.free_table(blocks.pool.allocate(7))  # evicts the second block
    assert known(blocks, range(8)) == 1
    assert blocks.find_scores(one, 1) is None


# --- room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "samples", "needed"), [(1, 1, 1), (8, 1, 2), (9, 1, 3), (9, 3, 5), (8, 3, 2)])
def test_full_prompt_blocks_are_needed_once_and_others_per_sample(prompt, samples, needed):
    """In blocks of 4 tokens: with 9 tokens, two blocks are shared by all samples."""
    blocks = manager(16)
    samples = [sequence(blocks, range(prompt)) for _ in range(samples)]
    assert blocks.pages_to_admit(samples, NO_HIT) == blocks.missing_pages(samples, forked=False) == needed


def test_cached_blocks_must_be_available_and_used_blocks_need_not():
    """A cached block is taken from the available ones. A block that another request uses is only shared."""
    blocks = manager(8)
    one, waiting = cached(blocks, range(8)), sequence(blocks, range(9))
    assert blocks.pages_to_admit([waiting], blocks.match(waiting, 9)) == 1
    blocks.free(one)
    assert blocks.pages_to_admit([waiting], blocks.match(waiting, 9)) == 3


def test_a_partial_hit_needs_a_page_to_lock_its_source():
    blocks = manager(8)
    one, waiting = cached(blocks, range(8)), sequence(blocks, [0, 1, 2, 3, 4, 5, 90, 91])
    assert blocks.pages_to_copy_partial(blocks.match(waiting, 8)) == 0
    blocks.free(one)
    assert blocks.pages_to_copy_partial(blocks.match(waiting, 8)) == 1


def test_a_running_sequence_lacks_what_it_will_hold_and_does_not_hold():
    blocks = manager(64, kinds=(FULL, WINDOW))
    one = sequence(blocks, range(40))
    whole = blocks.missing_pages([one], forked=True)
    assert whole == blocks.layout.pages_for([40], [40], 0)
    missing = []
    for end in range(4, 44, 4):
        assert blocks.extend(one, end)
        one.computed = end
        blocks.commit(one, end)
        missing.append(blocks.missing_pages([one], forked=True))
    assert missing == sorted(missing, reverse=True) and missing[-1] <= WINDOW.pages


# --- events ---------------------------------------------------------------------------------------------------------


def events_of(blocks_events):
    """Return events as (stored, first token, medium), and forget them."""
    found = [(event.stored, event.entry.tokens[0], event.medium) for event in blocks_events]
    blocks_events.clear()
    return found


def test_cached_and_evicted_contents_are_events():
    events = []
    blocks = manager(2, listener=events.append)
    one = cached(blocks, range(8))
    assert events[1].entry.parent is events[0].entry and events[0].entry.prefix == (Origin(""), [0, 1, 2, 3])
    assert events_of(events) == [(True, 0, "GPU"), (True, 4, "GPU")]
    blocks.free(one)
    assert events == []  # the blocks keep their contents
    cached(blocks, [9] * 4)
    assert events_of(events) == [(False, 4, "GPU"), (True, 9, "GPU")]  # the tail is evicted first


def test_contents_of_the_host_have_their_own_medium():
    events = []
    blocks = manager(1, host=2, listener=events.append)
    blocks.free(cached(blocks, [1] * 4))
    events.clear()
    blocks.free(cached(blocks, [2] * 4))
    assert events_of(events) == [(True, 1, "CPU"), (False, 1, "GPU"), (True, 2, "GPU")]


def test_events_are_those_of_the_first_kind():
    events = []
    blocks = manager(20, kinds=(FULL, WINDOW), listener=events.append)
    cached(blocks, range(8))
    assert events_of(events) == [(True, 0, "GPU"), (True, 4, "GPU")]
