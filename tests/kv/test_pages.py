"""The page pool: blocks of one or several pages, their references, the order of eviction, and the pool map."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.api.request import Origin
from paged_backend.kv.content import Chain, Contents
from paged_backend.kv.pages import NULL, RUN_PAGES, FreePages, PagePool
from tests.support.stress import table

KINDS = (1, 2, 3, 0, 4)  # pages of a block
SINGLE = 4  # the kind whose blocks do not follow each other


class Entries:
    """Contents of blocks, which are all different."""

    def __init__(self):
        self._contents, self._count = Contents(), 0

    def __next__(self):
        self._count += 1
        return self._contents.extend(Chain(Origin("")), [self._count], 1, 1)


def cached(pool, count, entries=None, kind=0):
    """Return blocks that are cached, the first of which is evicted first."""
    entries, blocks = entries or Entries(), pool.allocate(count, kind)
    for block in blocks:
        assert pool.index(block, next(entries))
    for block in blocks:
        pool.free(block)
    return blocks


class Model:
    """A pool made of dicts that are searched one by one."""

    def __init__(self, num_pages):
        self.num_pages = num_pages
        self.free = set(range(num_pages))
        self.kinds = {}  # by block that is in use or cached
        self.references = {}
        self.pages = {}
        self.indexed = {}
        self.cached = []  # the first is evicted next
        self.evicted = []

    def available(self):
        return len(self.free) + sum(KINDS[self.kinds[block]] for block in self.cached)

    def evict(self, num_pages):
        """Make pages free, the least recently used block first."""
        while len(self.free) < num_pages:
            self.evicted.append(self.cached[0])
            self.forget(self.cached[0])

    def take(self, block, pages, kind):
        """Follow the allocation of a block, given its pages."""
        assert self.free.issuperset(pages) and len(pages) == KINDS[kind] and block not in self.kinds
        assert block == pages[0] if pages else block >= self.num_pages
        self.free.difference_update(pages)
        self.kinds[block], self.references[block] = kind, 1
        self.pages[block] = pages

    def drop(self, block):
        self.references[block] -= 1
        if not self.references[block]:
            del self.references[block]
            self.cached.append(block) if block in self.indexed else self.release(block)

    def hold(self, block):
        if block in self.cached:
            self.cached.remove(block)
        self.references[block] = self.references.get(block, 0) + 1

    def forget(self, block):
        if self.indexed.pop(block, None) and block in self.cached:
            self.cached.remove(block)
            self.release(block)

    def release(self, block):
        del self.kinds[block]
        self.free.update(self.pages[block])


def play(seed, num_steps=200):
    """Apply random operations to a pool and to the model, and compare them after each."""
    rnd, entries, offloaded = random.Random(seed), Entries(), []
    num_pages = rnd.randint(3, 24)
    options = {"single": SINGLE, "caching": True, "on_evict": offloaded.append}
    pool, model = PagePool(num_pages, KINDS, **options), Model(num_pages)
    tables = []  # (blocks, whether it is the one block of a transfer)
    for _ in range(num_steps):
        held = [block for blocks, _ in tables for block in blocks]
        choice = rnd.random()
        if choice < 0.35:
            count, kind = rnd.randint(0, 5), rnd.randrange(len(KINDS))
            after = rnd.choice([NULL, *(block for block in held if model.kinds[block] == kind)])
            before = () if after == NULL else model.pages[after]
            free = set(model.free)
            blocks = pool.allocate(count, kind, after=after)
            assert (blocks is None) == (count * KINDS[kind] > model.available())
            if blocks:
                model.evict(count * KINDS[kind])
            runs = list(zip(*map(pool.pages_of, blocks or ()), strict=True))  # of one part of all blocks
            starts = before or [NULL] * KINDS[kind]
            if kind == SINGLE:
                runs = list(map(pool.pages_of, blocks or ()))
                starts = [NULL] * len(runs)
            for last, run in zip(starts, runs, strict=bool(blocks)):
                for page in run:
                    continues = last == NULL or page == last + 1 or last + 1 not in free
                    assert continues, "an extent is not continued"
                    free.discard(page)
                    last = page
            for block in blocks or ():
                model.take(block, pool.pages_of(block), kind)
                assert pool.kind_of(block) == kind
            if blocks:
                tables.append((blocks, False))
        elif choice < 0.6 and held:
            block, entry = rnd.choice(held), next(entries)
            assert pool.index(block, entry) == (block not in model.indexed)
            model.indexed.setdefault(block, entry)
            assert pool.entry(block) is model.indexed[block]
            assert pool.find(model.indexed[block], model.kinds[block]) == block
        elif choice < 0.7 and model.kinds:
            block, locks = rnd.choice(list(model.kinds)), rnd.random() < 0.3
            pool.lock(block) if locks else pool.touch(block)
            model.hold(block)
            tables.append(([block], locks))
        elif choice < 0.75 and model.kinds:
            block = rnd.choice(list(model.kinds))
            pool.forget(block)
            model.forget(block)
        elif tables:
            blocks, locks = tables.pop(rnd.randrange(len(tables)))
            for block in reversed(blocks):
                model.drop(block)
            pool.unlock(*blocks) if locks else pool.free_table(blocks)
        locked = [block for blocks, locks in tables for block in blocks if locks]
        compare(pool, model, [blocks for blocks, locks in tables if not locks], locked)
        assert offloaded == model.evicted and pool.num_evictions == len(offloaded)


def compare(pool, model, tables, locked):
    pool.check(tables)
    assert pool.blocks == model.kinds.keys()
    assert (pool.num_cached, pool.num_available) == (model.available() - len(model.free), model.available())
    assert pool.num_used == pool.num_pages - pool.num_available
    assert pool.num_shared == sum(count > 1 for count in model.references.values())
    for block in model.kinds:
        count = model.references.get(block, 0)
        assert (pool.is_cached(block), pool.is_used(block)) == (block in model.cached, count > 0)
        assert pool.is_shared(block) == (count - locked.count(block) > 1)
    held = [block for blocks in tables for block in blocks]
    freed = [block for block in set(held) if held.count(block) == model.references[block]]
    assert pool.num_freed_by(tables) == sum(KINDS[model.kinds[block]] for block in freed)
    marks = ["."] * pool.num_pages
    for block, kind in model.kinds.items():
        count = model.references.get(block, 0)
        for page in model.pages[block]:
            marks[page] = "c" if not count else str(count) if count < 10 else "+"
        assert len(model.pages[block]) == KINDS[kind]
    for kind in range(len(KINDS)):
        of_kind = [block for block in model.kinds if model.kinds[block] == kind]
        num_cached = sum(block in model.cached for block in of_kind)
        assert pool.num_blocks(kind) == (len(of_kind) - num_cached, num_cached)
        if KINDS[kind]:
            rows = pool.page_rows(kind, of_kind)
            assert rows.tolist() == [list(pool.pages_of(block)) for block in of_kind]
    assert pool.map() == "".join(marks)


@pytest.mark.parametrize("examples", [60, pytest.param(5000, marks=pytest.mark.nightly)])
def test_random_operations_match_a_simple_model(examples):
    @settings(max_examples=examples, deadline=None)
    @given(st.integers(0, 2**32))
    def run(seed):
        play(seed)
        table.record("page pool: operations compared with a model", 200)

    run()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(0, 2**32))
def test_free_runs_hold_the_free_pages(num_pages, seed):
    """A new run starts where most pages follow, of which a growing sequence keeps half."""
    rnd, free, taken, growing = random.Random(seed), FreePages(num_pages), set(), set()
    for _ in range(4 * num_pages):
        page, choice = rnd.randrange(num_pages + 1), rnd.random()
        if page in taken and choice < 0.5:
            free.put(page)
            taken.remove(page)
            growing.discard(page)
        elif page in taken and choice < 0.6:
            free.end_growth(page)
            growing.discard(page)
        elif page in taken:
            count = rnd.randint(1, 3)
            (run,) = [run for run in runs_of(set(range(num_pages)) - taken) if run[0] == page + 1] or [[]]
            assert free.take_after(page, count) == len(run[:count])
            growing.discard(page)
            growing.update(run[:count][-1:])
            taken.update(run[:count])
        elif len(taken) < num_pages:
            runs = runs_of(set(range(num_pages)) - taken)
            ends = [run[len(run) // 2 :] if run[0] - 1 in growing else run for run in runs]
            longest = free.longest
            assert longest == max(map(len, ends))
            page = free.start_run()
            assert page in [end[0] for end in ends if len(end) == longest]
            taken.add(page)
            growing.add(page)
        free.check()
        assert sorted(free) == sorted(set(range(num_pages)) - taken) and len(free) == num_pages - len(taken)


def runs_of(pages):
    """Return the runs of consecutive numbers in a set."""
    runs = []
    for page in sorted(pages):
        if not runs or page != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(page)
    return runs


def test_growing_sequences_have_long_extents():
    """In a pool that is full of cached blocks, of which running sequences hold 60%. Others end and begin meanwhile."""
    rnd, entries, pool = random.Random(0), Entries(), PagePool(4096, caching=True, run_pages=RUN_PAGES)
    tables, means = [], []
    for step in range(40_000):
        table = rnd.choice(tables) if tables and step % 100 else []
        if not table:
            tables.append(table)
            table += pool.allocate(rnd.randint(1, 30))
        table += pool.allocate(1, after=table[-1])
        while sum(map(len, tables)) > 0.6 * 4096:
            ended = tables.pop(rnd.randrange(len(tables)))
            for block in ended:
                pool.index(block, next(entries))
            pool.free_table(ended)
        if step > 20_000 and not step % 1000:
            breaks = sum(second != first + 1 for table in tables for first, second in pairwise(table))
            means.append(sum(map(len, tables)) / (len(tables) + breaks))
    pool.check(tables)
    assert pool.num_evictions > 20_000
    assert min(means) >= 6, means


def test_few_blocks_are_evicted_early():
    """Of a pool whose cached blocks are scattered, so that many would have to go before there is a run."""
    pool, entries, rnd = PagePool(4096, caching=True, run_pages=RUN_PAGES), Entries(), random.Random(0)
    blocks = pool.allocate(4096)
    for block in rnd.sample(blocks, 4096):
        pool.index(block, next(entries))
        pool.free(block)
    for count in range(1, 500):
        pool.free_table(pool.allocate(1))
        assert len(pool._free) <= 4096 / 16, count


def test_the_page_after_an_ended_sequence_is_not_claimed():
    pool, entries = PagePool(16, caching=True), Entries()
    assert cached(pool, 4, entries) == [0, 1, 2, 3]
    assert pool.allocate(1) == [4]
    assert pool.allocate(1) == [10]  # the middle of what the other one claims


def test_least_recently_used_block_is_evicted_first():
    pool = PagePool(4, caching=True)
    blocks = cached(pool, 4)
    pool.touch(blocks[0])
    pool.free(blocks[0])
    assert [pool.allocate(1)[0] for _ in range(4)] == [*blocks[1:], blocks[0]]
    assert pool.num_evictions == 4


def test_the_tail_of_a_table_is_evicted_first():
    pool, entries = PagePool(4, caching=True), Entries()
    blocks = pool.allocate(3)
    for block in blocks:
        pool.index(block, next(entries))
    left = [blocks[0], NULL, blocks[1], blocks[2]]
    pool.free_table(left)
    assert left == []
    assert [pool.allocate(1)[0] for _ in range(4)][1:] == blocks[::-1]


def test_pages_of_an_evicted_block_serve_another_kind():
    pool = PagePool(6, KINDS[:3], caching=True)
    (wide,) = cached(pool, 1, kind=2)
    assert (pool.num_available, pool.num_cached) == (6, 3)
    assert pool.allocate(3, 1) is not None
    assert pool.entry(wide) is None and pool.num_available == 0
    assert pool.map() == "111111"


def test_a_refused_allocation_evicts_nothing():
    pool = PagePool(4, caching=True)
    cached(pool, 3)
    assert pool.allocate(5) is None
    assert (pool.map(), pool.num_evictions) == ("ccc.", 0)


def test_equal_content_is_indexed_once():
    pool, entry = PagePool(4, (1, 1), caching=True), next(Entries())
    first, second = pool.allocate(2)
    assert pool.index(first, entry) and not pool.index(second, entry)
    (other,) = pool.allocate(1, 1)
    assert pool.index(other, entry)  # of another kind
    assert (pool.find(entry), pool.find(entry, 1)) == (first, other)


def test_without_caching_no_content_is_kept():
    pool = PagePool(2)
    (block,) = pool.allocate(1)
    assert not pool.index(block, next(Entries()))
    pool.free(block)
    assert (pool.num_available, pool.num_cached) == (2, 0)


@pytest.mark.parametrize("block", [-1, 0, 1, 4])
def test_freeing_a_block_that_is_not_in_use_is_an_error(block):
    """A free block, a cached one, and blocks that do not exist."""
    pool = PagePool(4, caching=True)
    assert cached(pool, 1) == [0]
    with pytest.raises(ValueError, match=f"block {block}: freed, but not in use"):
        pool.free(block)
    pool.check([])


def test_check_detects_wrong_reference_count():
    pool = PagePool(4)
    blocks = pool.allocate(3)
    for wrong in ([blocks[:-1]], [blocks, blocks[:1]]):
        with pytest.raises(AssertionError, match="wrong reference count"):
            pool.check(wrong)
    pool.check([blocks])


@pytest.mark.parametrize("tables", [1, 2, 9, 10, 255, 256, 300])
def test_pool_map_shows_reference_count(tables):
    pool = PagePool(4)
    first, _ = pool.allocate(2)
    for _ in range(tables - 1):
        pool.touch(first)
    assert pool.map() == f"{tables if tables < 10 else '+'}1.."


def test_pool_map_shows_every_page_and_what_only_sessions_hold():
    pool = PagePool(9, (1, 3), caching=True)
    (one,), (wide,) = cached(pool, 1), pool.allocate(1, 1)
    pages = pool.pages_of(wide)
    assert pages[0] == wide and len(pages) == 3
    assert {pool.map()[page] for page in pages} == {"1"} and pool.map()[one] == "c"
    assert {pool.map({wide: 1})[page] for page in pages} == {"p"}
    pool.touch(wide)
    assert {pool.map({wide: 1})[page] for page in pages} == {"2"}
    assert pool.map().count(".") == 5


def test_null_becomes_the_page_of_zeros():
    """It is the page after the last one of the pool."""
    pool = PagePool(8, (1, 2))
    (narrow,), (wide,) = pool.allocate(1), pool.allocate(1, 1)
    tables = np.array([[NULL, narrow]], dtype=np.int32)
    assert [one.tolist() for one in pool.page_tables(0, tables)] == [[[8, narrow]]]
    tables = np.array([[NULL, wide]], dtype=np.int32)
    assert [one.tolist() for one in pool.page_tables(1, tables)] == [[[8, page]] for page in pool.pages_of(wide)]


def test_no_page_is_claimed_after_a_block_that_none_follows():
    pool = PagePool(12, (1, 4), single=1)
    (state,) = pool.allocate(1, 1)
    assert pool.pages_of(state) == (0, 1, 2, 3)
    assert pool.allocate(1) == [4]
