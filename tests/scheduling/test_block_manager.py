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

from paged_backend.scheduling.block_manager import BlockManager
from tests.support.pool_machine import RULES, STATES, play, play_seeds, truncated_keys
from tests.support.pool_state import PART
from tests.support.stress import table


def assert_all_seen(seen):
    """Assert that every rule was applied and every state was met."""
    assert [name for name in (*RULES, *STATES) if not seen[name]] == []


@pytest.mark.parametrize("examples", [100, pytest.param(5000, marks=pytest.mark.nightly)])
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
    assert steps >= 100 * examples


@pytest.mark.parametrize(
    ("wanted", "first"),
    [
        (10_000, lambda: 0),
        pytest.param(50_000_000, lambda: SystemRandom().randrange(2**48), marks=pytest.mark.nightly),
    ],
    ids=["10,000", "50 million"],
)
def test_seeded_rules_match_model(wanted, first, until, figures):
    """The nightly run starts from a random seed."""
    first, seen, steps = first(), Counter(), 0
    batches = (range(start, start + 5) for start in count(first, 5))
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


def test_scheduling_core_does_not_import_torch():
    """The scheduling core is tested with millions of steps, without torch."""
    for module in CORE:
        imports = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(module.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            )
        }
        assert imports <= set(sys.stdlib_module_names) | {"paged_backend", "numpy"}, module


def test_scheduler_loads_without_torch():
    code = "import paged_backend.scheduling.scheduler, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_copy_source_is_referenced_until_copied():
    blocks = BlockManager(3, 4)
    first = blocks.allocate(1)
    copy = blocks.make_writable(first, 0)
    assert blocks.pool.states() == "11."
    blocks.finish_copies([copy])
    assert blocks.pool.states() == ".1."
