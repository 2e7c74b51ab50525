"""Block transfers: which content ends up where, and which queue waits for which."""

from dataclasses import dataclass, field

import pytest
import torch

from paged_backend.kv.cache import CacheLayout, KVCache, LayerShape
from paged_backend.kv.ledger import Transfer, Transfers
from paged_backend.kv.page_copier import PageCopier

SHAPES = [LayerShape(num_kv_heads=2, head_dim=8), LayerShape(num_kv_heads=1, head_dim=16)]


def copies(*pages: tuple[int, int]) -> tuple[Transfer, ...]:
    """Return transfers of blocks of one page."""
    return tuple(Transfer(source, target, pages=((source, target),)) for source, target in pages)


OUTS, INS, COPIES = copies((1, 3), (2, 0)), copies((1, 4)), copies((0, 5))


def make_cache(num_blocks: int) -> KVCache:
    return KVCache.allocate(CacheLayout.of(SHAPES, 4, torch.float32), num_blocks, torch.device("cpu"))


def write(cache: KVCache, block: int, number: int) -> None:
    cache.memory[block] = number


def read(cache: KVCache) -> list[int]:
    """Return the number that every byte of each block holds."""
    found = [set(block.tolist()) for block in cache.memory]
    assert all(len(numbers) == 1 for numbers in found), found
    return [number for numbers in found for number in numbers]


@dataclass
class FakeQueues:
    """Queues that only record their calls. An event is the name and the length of its queue."""

    queues: dict[str, list] = field(default_factory=lambda: {"compute": [], "swap": []})
    blocked: list = field(default_factory=list)

    def launch(self, queue, pair, moves):
        self.queues[queue].append(tuple(moves))

    def record(self, queue):
        return queue, len(self.queues[queue])

    def wait(self, queue, event):
        self.queues[queue].append(("wait", *event))

    def block(self, event):
        self.blocked.append(event)

    def step(self, name):
        """Enqueue a step on the compute queue."""
        self.queues["compute"].append(name)

    def before(self, queue, item) -> list:
        """Return everything that is certainly done before an item of a queue begins."""
        return self._until(queue, self.queues[queue].index(item))

    def until(self, event) -> list:
        return self._until(*event)

    def _until(self, queue, length) -> list:
        done = []
        for item in self.queues[queue][:length]:
            done += self._until(*item[1:]) if item[0] == "wait" else [item]
        return done


@pytest.fixture
def queues():
    return FakeQueues()


@pytest.fixture
def transfers(queues):
    return PageCopier(make_cache(6), make_cache(4), queues)


def test_swap_out_then_swap_in_then_copy():
    """The swap-in is to the block that a swap-out left, from the host block that another swap-out takes; the copy is of
    a block that was just swapped in."""
    pool, host = make_cache(5), make_cache(3)
    for block in range(5):
        write(pool, block, 8 + block)
    for block in range(3):
        write(host, block, 16 + block)
    transfers = PageCopier(pool, host)
    transfers.move(Transfers(copies((1, 0), (2, 1)), copies((2, 1), (0, 3)), copies((3, 4), (1, 0))))
    transfers.settle()
    assert [read(pool), read(host)] == [[18, 18, 10, 9, 9], [9, 10, 18]]


def test_empty_transfer_enqueues_nothing(queues, transfers):
    transfers.move(Transfers())
    transfers.arrive()
    transfers.settle()
    assert queues == FakeQueues()


def test_copy_without_a_host_pool():
    pool = make_cache(3)
    write(pool, 1, 5)
    PageCopier(pool).move(Transfers(copies=copies((1, 2))))
    assert read(pool) == [0, 5, 5]


def test_swap_out_is_ordered_between_writes(queues, transfers):
    queues.step("writes the sources of outs")
    transfers.move(Transfers(OUTS))
    queues.step("overwrites the sources of outs")
    assert queues.before("swap", OUTS) == ["writes the sources of outs"]
    assert OUTS in queues.before("compute", "overwrites the sources of outs")


def test_swap_in_waits_for_swap_out_and_earlier_reads(queues, transfers):
    queues.step("reads the targets of ins")
    transfers.move(Transfers(OUTS, INS, COPIES))
    queues.step("reads the ins")
    assert queues.before("swap", INS) == ["reads the targets of ins", OUTS]
    assert {OUTS, INS} <= set(queues.before("compute", COPIES))
    assert {OUTS, INS, COPIES} <= set(queues.before("compute", "reads the ins"))


def test_swap_in_delays_only_the_step_that_reads_it(queues, transfers):
    transfers.swap(OUTS, INS)
    queues.step("reads other blocks")
    transfers.arrive()
    queues.step("reads the ins")
    transfers.arrive()
    assert queues.before("compute", "reads other blocks") == [OUTS]
    assert INS in queues.before("compute", "reads the ins")
    assert len(queues.queues["compute"]) == 4, "each swap-in is waited for once"


@pytest.mark.parametrize("first", [((), INS), (OUTS, ())], ids=["ins", "outs"])
def test_swaps_run_in_order(queues, transfers, first):
    """A host block that is swapped in may be the target of the next swap-out, and the other way around."""
    transfers.swap(*first)
    second = copies((5, 1)), copies((3, 2))
    transfers.swap(*second)
    transfers.arrive()
    queues.step("reads the ins")
    assert set(filter(None, first)) <= set(queues.before("swap", second[0]))
    assert {second[1], *filter(None, first)} <= set(queues.before("compute", "reads the ins"))


def test_copy_waits_for_pending_swap_in(queues, transfers):
    transfers.swap((), INS)
    transfers.copy(COPIES)
    assert INS in queues.before("compute", COPIES)


@pytest.mark.parametrize(("moves_out", "moves_in"), [(OUTS, ()), ((), INS), (OUTS, INS)], ids=["outs", "ins", "both"])
def test_settle_waits_for_all_swaps(queues, transfers, moves_out, moves_in):
    transfers.swap(copies((5, 2)), ())
    transfers.move(Transfers(moves_out, moves_in, COPIES))
    assert not queues.blocked
    transfers.settle()
    transfers.settle()
    assert len(queues.blocked) == 1
    assert {moves for moves in (moves_out, moves_in) if moves} <= set(queues.until(queues.blocked[0]))
    assert COPIES not in queues.until(queues.blocked[0]), "settle does not wait for the compute queue"
