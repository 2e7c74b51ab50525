"""The tests of sharing, held against themselves: each of these mistakes must make one of them fail."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS, SCHEDULER, SEQUENCE = "block_manager.py", "scheduler.py", "sequence.py"

MUTANTS = {  # (file, what is right, what is not)
    "a released block is not let go": (BLOCKS, "        self._references[block] -= 1\n", ""),
    "a shared block is freed with its first holder": (
        BLOCKS,
        "        elif self._references[block] == 0:",
        "        if self._references[block] <= 1:",
    ),
    "a hold is not counted": (BLOCKS, "        self._references[block] += 1\n", ""),
    "a cached block stays evictable while it is held": (BLOCKS, "        self._cached.pop(block, None)\n", ""),
    "the newest cached block is evicted first": (BLOCKS, "popitem(last=False)", "popitem(last=True)"),
    "the head is released before the tail": (BLOCKS, "for block in reversed(table):", "for block in table:"),
    "an evicted block is still found": (BLOCKS, "        del self._by_key[key]\n", ""),
    "an evicted block keeps its key": (BLOCKS, "        self._keys[block] = None\n", ""),
    "an evicted block is still somebody's child": (
        BLOCKS,
        "        del siblings[bisect_left(siblings, (content, block))]\n",
        "",
    ),
    "salts are forgotten": (BLOCKS, "blake2b(salt.encode(),", "blake2b(b'',"),
    "a key does not depend on what came before": (BLOCKS, 'parent + array("q", tokens)', 'array("q", tokens)'),
    "a hit may leave nothing to compute": (BLOCKS, "len(tokens) - 1\n", "len(tokens)\n"),
    "a partial hit is one token too long": (
        BLOCKS,
        "return Hit(tuple(blocks), partial, length)",
        "return Hit(tuple(blocks), partial, length + (partial is not None))",
    ),
    "the children are searched on one side only": (BLOCKS, "max(0, place - 1) : place + 1", "place : place + 1"),
    "the source of a copy is not held": (BLOCKS, "        self.hold(source)\n", ""),
    "the source of a copy is held for ever": (BLOCKS, "            self.drop(copy.source)\n", ""),
    "sources of copies count as shared": (BLOCKS, " - self._reading[block] > 1", " > 1"),
    "nothing is ever shared": (BLOCKS, " - self._reading[block] > 1", " - self._reading[block] > 99"),
    "a fork does not hold": (
        BLOCKS,
        "        for block in table:\n            self.hold(block)\n        return list(table)",
        "        return list(table)",
    ),
    "copies are not handed to the step": (
        SCHEDULER,
        "return Plan(chunks, copies, tuple",
        "return Plan(chunks, (), tuple",
    ),
    "a block is known before it is full": (
        SCHEDULER,
        "range(first, sequence.computed // size)",
        "range(first, min(len(sequence.blocks), -(-sequence.computed // size)))",
    ),
    "the victim of a dry pool is the oldest": (
        SCHEDULER,
        "next(reversed(self._running.values()))",
        "next(iter(self._running.values()))",
    ),
    "a preempted group does not compute its prompt again": (SCHEDULER, "            sequence.computed = 0\n", ""),
    "a preempted group does not fork again": (SCHEDULER, "        group.forked = len(group.sequences) == 1\n", ""),
    "samples are let in one too many": (
        SCHEDULER,
        "len(group.sequences) > room.seqs",
        "room.seqs < 1",
    ),
    "what a hit brings back counts as available": (SCHEDULER, " + sum(map(self.blocks.is_cached, hit.blocks))", ""),
    "a copy that leaves no room is made": (
        SCHEDULER,
        "needed + self.blocks.is_cached(hit.partial) > available",
        "needed > available",
    ),
    "priorities are forgotten": ("request.py", "return self.sampling.priority, self.key", "return 0, self.key"),
    "an equal displaces an equal": (
        SCHEDULER,
        "self._last.rank[0] > group.rank[0]",
        "self._last.rank[0] >= group.rank[0]",
    ),
    "the samples draw the same": (SEQUENCE, "self.request.seed + self.index", "self.request.seed"),
    "all samples go on when one ends": (SCHEDULER, "        group.sequences.remove(sequence)\n", ""),
}


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_about_code_that_is_there(mistake):
    file, right, _ = MUTANTS[mistake]
    assert right in (ROOT / "paged_backend" / file).read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_found(tmp_path, mistake):
    file, right, wrong = MUTANTS[mistake]
    for name in ("paged_backend", "tests", "kernels", "client"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    source = (tmp_path / "paged_backend" / file).read_text()
    assert source.count(right) >= 1, "the code that the mistake is about has changed"
    (tmp_path / "paged_backend" / file).write_text(source.replace(right, wrong, 1))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "tests/test_memory.py"]
    command += ["tests/test_block_manager.py", "tests/test_scheduler.py"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that never ends is found, too
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 1, done.stdout[-2000:]
