"""Several tiers behind one interface: which tier is read, and which are written."""

import pytest
import torch

from paged_backend.kv.stores import chain as tier_chain
from paged_backend.kv.stores.chain import READ_BLOCKS, StoreChain
from paged_backend.kv.stores.disk import DiskStore
from paged_backend.kv.stores.store import MAX_QUEUED_BLOCKS, ReadCost
from tests.support.disk_blocks import FORMAT, content, prefix


class CountingTier(DiskStore):
    """A disk tier whose reads are counted, and take a fixed time according to their measurement."""

    def __init__(self, directory, seconds=0.0):
        super().__init__(directory, "ab12", 10**6, FORMAT)
        self.seconds, self.reads = seconds, 0

    def read(self, entries):
        self.reads += 1
        blocks = super().read(entries)
        if blocks:
            self.cost.reset()
            self.cost.record(self.seconds * len(blocks), len(blocks))
        return blocks


@pytest.fixture
def tiers(tmp_path):
    made = [CountingTier(tmp_path / name) for name in ("first", "second")]
    yield made
    for tier in made:
        tier.close()


def read(chain, entries):
    return [block for blocks in chain.read(entries) for block in blocks]


def fill(tier, entries, value=1):
    for entry in entries:
        tier.put(entry, content(value))
        tier.settle(60)


def test_a_prefix_is_read_from_several_tiers_in_order(tiers):
    entries = prefix(3 * READ_BLOCKS)
    fill(tiers[0], entries[:10], 1)
    fill(tiers[1], entries[10:20], 2)
    found = read(StoreChain(tiers, 1.0), entries)
    assert [block[0, 0].item() for block in found] == [1] * 10 + [2] * 10


def test_the_cheapest_tier_is_read_first(tiers):
    entries = prefix(4)
    for value, (tier, seconds) in enumerate(zip(tiers, (0.2, 0.1), strict=True)):
        fill(tier, entries, value)
        tier.cost.record(seconds, 1)
    assert [block[0, 0].item() for block in read(StoreChain(tiers, 1.0), entries)] == [1] * 4
    assert tiers[0].reads == 0


def test_a_tier_slower_than_computing_is_read_only_to_measure_it(tiers, monkeypatch):
    entries = prefix(2 * READ_BLOCKS)
    fill(tiers[0], entries)
    tiers[0].seconds = 0.3
    chain = StoreChain(tiers[:1], max_seconds=0.2)
    assert [len(read(chain, entries)) for _ in range(3)] == [READ_BLOCKS, 0, 0]
    tiers[0].seconds = 0.1
    assert read(chain, entries) == []
    monkeypatch.setattr(tier_chain, "MEASURE_SECONDS", 0.0)
    assert len(read(chain, entries)) == 2 * READ_BLOCKS


def test_blocks_are_written_to_every_tier_that_lacks_them(tiers):
    one, two = prefix(2)
    fill(tiers[0], [one])
    chain = StoreChain(tiers, 1.0)
    for entry in (one, two):
        assert chain.should_write(entry)
        chain.put(entry, content(3))
    chain.settle(60)
    assert chain.is_idle
    assert not chain.should_write(one)
    assert [tier.stats["disk_written"] for tier in tiers] == [2, 2]
    assert chain.free_queue_slots == MAX_QUEUED_BLOCKS


def test_a_chain_is_up_while_one_of_its_tiers_is(tiers, tmp_path):
    chain = StoreChain(tiers, 1.0)
    entries = prefix(2)
    fill(tiers[0], entries[:1])
    fill(tiers[1], entries, 2)
    for path in (tmp_path / "first").glob("*/*/*"):
        path.write_bytes(b"damaged")
    changes = []
    chain.on_change(lambda: changes.append(chain.up))
    found = read(chain, entries)
    assert changes == [True]
    assert (tiers[0].up, tiers[1].up, chain.up) == (False, True, True)
    assert [block[0, 0].item() for block in found] == [2, 2]
    for path in (tmp_path / "second").glob("*/*/*"):
        path.write_bytes(b"damaged")
    assert read(chain, entries) == []
    assert not chain.up
    assert not chain.should_write(prefix(3)[-1])


def test_cost_is_the_median_per_block():
    cost = ReadCost()
    assert cost.seconds_per_block == 0
    for seconds, blocks in ((8.0, 4), (1.0, 1), (9.0, 1)):
        cost.record(seconds, blocks)
    assert cost.seconds_per_block == 2.0
    cost.reset()
    assert cost.seconds_per_block == 0


def test_read_blocks_are_those_that_were_written(tiers):
    entries = prefix(1)
    fill(tiers[1], entries, 5)
    (block,) = read(StoreChain(tiers, 1.0), entries)
    assert torch.equal(block, content(5))
