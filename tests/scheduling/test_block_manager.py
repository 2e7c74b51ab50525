"""The block manager compared with a simple model, by rules applied in random order."""

import ast
import subprocess
import sys
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import nullcontext
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from random import SystemRandom
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.api.request import Origin
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import Chain
from tests.support.pool_machine import RULES, STATES, play, play_seeds, truncated_keys
from tests.support.pool_state import PART
from tests.support.stress import table


def assert_all_seen(seen):
    """Assert that every rule was applied and every state was met."""
    assert [name for name in (*RULES, *STATES) if not seen[name]] == []


@pytest.mark.parametrize("examples", [1000, pytest.param(5000, marks=pytest.mark.nightly)])
def test_hypothesis_rules_match_model(examples):
    seen, steps = Counter(), 0

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(st.binary(min_size=PART, max_size=PART), min_size=150, max_size=600), st.sampled_from([0, 0, 4, 8]))
    def run(parts, bits):
        nonlocal steps
        with truncated_keys(bits) if bits else nullcontext():
            steps += play(parts, seen)

    run()
    assert_all_seen(seen)
    table.record("block manager: steps chosen by Hypothesis", steps)
    assert steps >= 200_000


@pytest.mark.parametrize(
    ("wanted", "first"),
    [
        (2_000_000, lambda: 0),
        pytest.param(50_000_000, lambda: SystemRandom().randrange(2**48), marks=pytest.mark.nightly),
    ],
    ids=["2 million", "50 million"],
)
def test_seeded_rules_match_model(wanted, first, until, figures):
    """The nightly run starts from a random seed."""
    first, seen, steps = first(), Counter(), 0
    batches = (range(start, start + 20) for start in count(first, 20))
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        running = {processes.submit(play_seeds, next(batches)) for _ in range(4)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for batch in done:
                more, happened = batch.result()
                steps, seen = steps + more, seen + happened
                if steps < wanted and monotonic() < until:
                    running.add(processes.submit(play_seeds, next(batches)))
    assert_all_seen(seen)
    figures(f"seeds from {first}")
    table.record("block manager: steps chosen by seeds", steps)


def test_releasing_unknown_block_names_it():
    blocks = BlockManager(4, 16)
    with pytest.raises(ValueError, match="block 4"):
        blocks.free([4])
    blocks.check([])


def test_check_detects_wrong_reference_count():
    blocks = BlockManager(4, 16)
    table = []
    assert blocks.grow(table, 40)
    with pytest.raises(AssertionError, match="wrong reference count"):
        blocks.check([table[:-1]])
    with pytest.raises(AssertionError, match="wrong reference count"):
        blocks.check([table, table[:1]])
    blocks.check([table])


CORE = [
    module
    for pattern in (
        "api/*.py",
        "scheduling/*.py",
        "text/detokenizer.py",
    )
    for module in sorted((Path(__file__).parents[2] / "paged_backend").glob(pattern))
]


@pytest.mark.parametrize("module", CORE, ids=lambda module: module.stem)
def test_scheduling_core_does_not_import_torch(module):
    """The scheduling core is tested with millions of steps, without torch."""
    imports = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imports <= set(sys.stdlib_module_names) | {"paged_backend", "numpy"}


def test_scheduler_loads_without_torch():
    code = "import paged_backend.scheduling.scheduler, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def naive_states(blocks):
    """Return the expected pool map, block by block."""
    free = set(range(blocks.num_blocks)) - {block for block, count in enumerate(blocks.pool._references) if count}
    marks = {block: "c" if blocks.pool.is_cached(block) else "." for block in free}
    held = {block: str(count) if count < 10 else "+" for block, count in enumerate(blocks.pool._references) if count}
    return "".join((marks | held)[block] for block in range(blocks.num_blocks))


@pytest.mark.parametrize("tables", [1, 2, 9, 10, 255, 256, 300])
def test_pool_map_shows_reference_count(tables):
    blocks = BlockManager(4, 4)
    first = []
    assert blocks.grow(first, 8)
    others = [blocks.fork(first[:1]) for _ in range(tables - 1)]
    mark = str(tables) if tables < 10 else "+"
    assert blocks.pool.states() == f"{mark}1.."
    assert (blocks.pool.states().count("."), len(others)) == (blocks.pool.num_free, tables - 1)


@pytest.mark.parametrize(("free", "cached", "held"), [(5, 0, 0), (0, 5, 0), (1, 3, 1), (3, 1, 1), (2, 2, 1), (0, 0, 5)])
def test_pool_map_distinguishes_free_and_cached(free, cached, held):
    """Both where more blocks are free and where more are cached: only the smaller set is walked."""
    blocks = BlockManager(free + cached + held, 4, caching=True)
    table = blocks.allocate(cached)
    tokens = list(range(4 * cached))
    chain = Chain(Origin(""))
    for index, block in enumerate(table):
        blocks.cache_block(block, chain, tokens, index)
    keep = blocks.allocate(held)
    blocks.free(table)
    assert blocks.pool.states() == naive_states(blocks)
    assert [blocks.pool.states().count(mark) for mark in ".c1"] == [free, cached, held]
    blocks.check([keep])


def test_copy_source_is_referenced_until_copied():
    blocks = BlockManager(3, 4)
    first = blocks.allocate(1)
    copy = blocks.make_writable(first, 0)
    assert blocks.pool.states() == "11."
    blocks.finish_copies([copy])
    assert blocks.pool.states() == ".1."
