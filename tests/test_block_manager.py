"""The block manager against a naive model of it: a set of free blocks and a dict of tables."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import new_chain, root_key


class Blocks(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 24), block_size=st.sampled_from([1, 2, 4, 16]))
    def start(self, num_blocks, block_size):
        self.blocks = BlockManager(num_blocks, block_size)
        self.free = set(range(num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.next = 0

    @rule(tokens=st.integers(0, 60))
    def admit(self, tokens):
        self.tables[self.next] = []
        self.grow(self.next, tokens)
        self.next += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(0, 20))
    def append(self, data, more):
        key = data.draw(st.sampled_from(sorted(self.tables)))
        self.grow(key, len(self.tables[key]) * self.blocks.block_size + more)

    def grow(self, key, tokens):
        table = self.tables[key]
        before, needed = list(table), -(-tokens // self.blocks.block_size) - len(table)
        if self.blocks.grow(table, tokens):
            new = table[len(before) :]
            assert table[: len(before)] == before
            assert len(new) == max(0, needed)
            assert set(new) <= self.free
            self.free -= set(new)
        else:
            assert needed > len(self.free)
            assert table == before

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.sampled_from(sorted(self.tables))))
        self.free |= set(table)
        self.blocks.release(table)
        assert table == []

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def release_of_a_free_block_raises(self, data):
        block = data.draw(st.sampled_from(sorted(self.free)))
        with pytest.raises(ValueError, match=f"block {block}"):
            self.blocks.release([block])

    @invariant()
    def conserved(self):
        assert self.blocks.num_free == len(self.free)
        assert self.blocks.num_free + self.blocks.num_used == self.blocks.num_blocks
        self.blocks.check(self.tables.values())
        assert self.blocks.states() == naive_states(self.blocks)

    def teardown(self):
        if hasattr(self, "blocks"):
            for table in self.tables.values():
                self.blocks.release(table)
            self.blocks.check([])
            assert self.blocks.num_used == 0


Blocks.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestBlocks = Blocks.TestCase


def test_a_released_block_of_no_pool_is_named():
    blocks = BlockManager(4, 16)
    with pytest.raises(ValueError, match="block 4"):
        blocks.release([4])
    blocks.check([])


def test_a_table_with_a_lost_block_fails_the_check():
    blocks = BlockManager(4, 16)
    table = []
    assert blocks.grow(table, 40)
    with pytest.raises(AssertionError, match="wrong count"):
        blocks.check([table[:-1]])
    with pytest.raises(AssertionError, match="wrong count"):
        blocks.check([table, table[:1]])
    blocks.check([table])


CORE = [
    module
    for pattern in (
        "config.py",
        "sampling_params.py",
        "request.py",
        "scheduling/*.py",
        "lora/slots.py",
        "frontend/detokenizer.py",
    )
    for module in sorted((Path(__file__).parents[1] / "paged_backend").glob(pattern))
]


@pytest.mark.parametrize("module", CORE, ids=lambda module: module.stem)
def test_the_core_imports_no_tensors(module):
    """So that the heart of the system can be tested by the million, without a tensor in sight."""
    imports = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imports <= set(sys.stdlib_module_names) | {"paged_backend", "numpy"}


def test_the_scheduler_loads_without_torch():
    code = "import paged_backend.scheduling.scheduler, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def naive_states(blocks):
    """What `states` promises, block by block."""
    free = set(range(blocks.num_blocks)) - {block for block, count in enumerate(blocks._references) if count}
    marks = {block: "c" if blocks.is_cached(block) else "." for block in free}
    held = {block: str(count) if count < 10 else "+" for block, count in enumerate(blocks._references) if count}
    return "".join((marks | held)[block] for block in range(blocks.num_blocks))


@pytest.mark.parametrize("tables", [1, 2, 9, 10, 255, 256, 300])
def test_a_state_tells_how_many_tables_hold_a_block(tables):
    blocks = BlockManager(4, 4)
    first = []
    assert blocks.grow(first, 8)
    others = [blocks.fork(first[:1]) for _ in range(tables - 1)]
    mark = str(tables) if tables < 10 else "+"
    assert blocks.states() == f"{mark}1.."
    assert (blocks.states().count("."), len(others)) == (blocks.num_free, tables - 1)


@pytest.mark.parametrize(("free", "cached", "held"), [(5, 0, 0), (0, 5, 0), (1, 3, 1), (3, 1, 1), (2, 2, 1), (0, 0, 5)])
def test_a_state_tells_free_from_cached(free, cached, held):
    """Whichever of the two are fewer, as those are found another way."""
    blocks = BlockManager(free + cached + held, 4, caching=True)
    table = blocks.allocate(cached)
    tokens = list(range(4 * cached))
    chain = new_chain(root_key(""))
    for index, block in enumerate(table):
        blocks.seal(block, chain, tokens, index)
    keep = blocks.allocate(held)
    blocks.release(table)
    assert blocks.states() == naive_states(blocks)
    assert [blocks.states().count(mark) for mark in ".c1"] == [free, cached, held]
    blocks.check([keep])


def test_the_source_of_a_copy_is_held_until_it_is_done():
    blocks = BlockManager(3, 4)
    first = blocks.allocate(1)
    copy = blocks.make_writable(first, 0)
    assert blocks.states() == "11."
    blocks.finish([copy])
    assert blocks.states() == ".1."
