"""The tests of sharing, held against themselves: each of these mistakes must make one of them fail."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS, CONTENT, SCHEDULER, SEQUENCE, BEAMS, PINS, PLAN = (
    f"scheduling/{module}.py"
    for module in ("block_manager", "content", "scheduler", "sequence", "beam_search", "pins", "plan")
)
SESSIONS = "frontend/sessions.py"

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
    "an evicted block is still found": (CONTENT, "        del self._by_key[entry.key]\n", ""),
    "an evicted block keeps its key": (BLOCKS, "        self.index.remove(block)\n", ""),
    "an evicted block is still somebody's child": (
        CONTENT,
        "        del siblings[bisect_left(siblings, (entry.tokens, block))]\n",
        "",
    ),
    "salts are forgotten": (CONTENT, "blake2b(salt.encode(),", "blake2b(b'',"),
    "a key does not depend on what came before": (CONTENT, 'parent + array("q", tokens)', 'array("q", tokens)'),
    "a hit may leave nothing to compute": (BLOCKS, "len(tokens) - 1\n", "len(tokens)\n"),
    "a partial hit is one token too long": (
        BLOCKS,
        "return (Place(block, there[1] > here[1]), length) if length",
        "return (Place(block, there[1] > here[1]), length + 1) if length",
    ),
    "the children are searched on one side only": (CONTENT, "max(0, place - 1) : place + 1", "place : place + 1"),
    "the source of a copy is not held": (
        BLOCKS,
        "        self.hold(block)\n        self._busy[block] += 1\n",
        "        self._busy[block] += 1\n        self._references[block] += 1\n",
    ),
    "the source of a copy is held for ever": (BLOCKS, "            self.unlock(copy.source)\n", "            pass\n"),
    "sources of copies count as shared": (BLOCKS, " - self._busy[block] > 1", " > 1"),
    "nothing is ever shared": (BLOCKS, " - self._busy[block] > 1", " - self._busy[block] > 99"),
    "a fork does not hold": (
        BLOCKS,
        "        for block in table:\n            self.hold(block)\n        return list(table)",
        "        return list(table)",
    ),
    "copies are not handed to the step": (
        PLAN,
        "_flat(self.copies), tuple",
        "(), tuple",
    ),
    "a block is known before it is full": (
        SCHEDULER,
        "range(first, sequence.committed // size)",
        "range(first, min(len(sequence.blocks), -(-sequence.committed // size)))",
    ),
    "the victim of a dry pool is the oldest": (
        SCHEDULER,
        "next(reversed(self._running.values()))",
        "next(iter(self._running.values()))",
    ),
    "a preempted group does not compute its prompt again": (
        SCHEDULER,
        "            sequence.computed = sequence.committed = 0\n",
        "",
    ),
    "a preempted group does not fork again": (SCHEDULER, "        group.forked = len(group.sequences) == 1\n", ""),
    "samples are let in one too many": (
        SCHEDULER,
        "group.num_seqs > room.seqs",
        "room.seqs < 1",
    ),
    "what a hit brings back counts as available": (SCHEDULER, " + sum(map(self.blocks.is_cached, here))", ""),
    "a copy that leaves no room is made": (
        SCHEDULER,
        "needed + taken > available",
        "needed > available",
    ),
    "priorities are forgotten": ("request.py", "return self.sampling.priority, self.key", "return 0, self.key"),
    "an equal displaces an equal": (SCHEDULER, "one.rank[0] > group.rank[0]]", "one.rank[0] >= group.rank[0]]"),
    "an equal takes the slot of an equal": (
        SCHEDULER,
        "if ones[0].rank[0] > group.rank[0])",
        "if ones[0].rank[0] >= group.rank[0])",
    ),
    "who uses the slot that is to come free is not looked at": (
        SCHEDULER,
        "in slot_users or [self._last]",
        "in [self._last]",
    ),
    "one is displaced for nothing": (
        SCHEDULER,
        "        needed = (demand or self._demand(group)).blocks\n        return needed <=",
        "        return 0 <=",
    ),
    "what was spilled once is spilled for ever": (
        BLOCKS,
        "            del self._fresh[block]\n",
        "            break\n",
    ),
    "the samples draw the same": (SEQUENCE, "self.request.seed + self.index", "self.request.seed"),
    "all samples go on when one ends": (SCHEDULER, "        group.sequences.remove(sequence)\n", ""),
    # a step in flight
    "a sequence computes on past its last token": (
        SCHEDULER,
        "if not (self._in_flight and sequence.has_all):",
        "if True:",
    ),
    "what is drawn after the end counts": (SCHEDULER, "if group is None or sequence.ended:", "if group is None:"),
    "what was computed after the end is known": (SCHEDULER, "if not sequence.ended:", "if True:"),
    "who computes for others books for nobody once it has ended": (
        SCHEDULER,
        "if group:\n                for",
        "if group and not chunk.sequence.ended:\n                for",
    ),
    "beams and guides go on before it is known from where": (
        SCHEDULER,
        " or any(group.in_turn for group in self._running.values())",
        "",
    ),
    "a block is known before its last token is": (
        SCHEDULER,
        "            sequence.computed = chunk.start + chunk.length\n",
        "            sequence.computed = chunk.start + chunk.length\n"
        "            self._book(sequence, chunk.start + chunk.length)\n",
    ),
    # guesses
    "what follows a wrong guess is taken": (PLAN, "drawn[right] == guesses[right]:", "True:"),
    "the keys of wrong guesses count": (
        SCHEDULER,
        "        sequence.computed = sequence.committed + len(tokens) - 1\n",
        "",
    ),
    "blocks of wrong guesses are kept": (
        SCHEDULER,
        "            self.blocks.drop(sequence.blocks.pop())\n            group.blocks_new -= 1\n",
        "            break\n",
    ),
    "guesses go past the last token": (SCHEDULER, "sequence.generated - 1\n", "sequence.generated\n"),
    "what arrives from the host is held for ever": (BLOCKS, "            self.unlock(move.target)\n", ""),
    # the host
    "what is evicted does not go to the host": (BLOCKS, "if self.host and self.host.caching and", "if False and"),
    "moves to the host are not handed to the step": (PLAN, "blocks.take_outs(), _flat", "(), _flat"),
    "moves from the host are not handed to the step": (PLAN, "_flat(self.ins), ", "(), "),
    "what arrives from the host is not known": (BLOCKS, "if done and move.entry and self.caching", "if False"),
    "a block for a partial hit is known as what it was": (BLOCKS, "._replace(entry=None)", ""),
    "a hit's blocks on the host are not held": (
        BLOCKS,
        "            self._lock(place) if place.on_host else self.hold(place.block)",
        "            self.host.unlock if place.on_host else self.hold(place.block)",
    ),
    "the source of a partial hit is held too late": (
        BLOCKS,
        "        if hit.partial:\n            self._lock(hit.partial)\n        table, moves, copies = [], [], []\n"
        "        for block, on_host in hit.blocks:",
        "        table, moves, copies = [], [], []\n        for block, on_host in hit.blocks:\n"
        "            if hit.partial and block == hit.blocks[-1].block:\n                self._lock(hit.partial)",
    ),
    "a block on its way to the host can be evicted there": (BLOCKS, "        self.host.lock(blocks[0])\n", ""),
    "a block that two sequences share is moved out twice": (
        BLOCKS,
        "            if block in moved:\n                self.host.hold(moved[block])\n            else:",
        "            if True:",
    ),
    "a block that two sequences share comes back held once": (
        BLOCKS,
        "            for _ in range(held[block] - 1):",
        "            for _ in range(0):",
    ),
    "a preempted request's blocks stay on the host": (
        SCHEDULER,
        "            self.blocks.host.release(sequence.swapped)\n",
        "            sequence.swapped.clear()\n",
    ),
    "moving costs nothing": (SCHEDULER, "2 * len(blocks) * self.costs.move", "0 * self.costs.token"),
    "what a failed step moved out counts as moved": (SCHEDULER, "lost.intersection(sequence.swapped)", "False"),
    # beams
    "a beam goes on once only": (
        SCHEDULER,
        "beam = left.pop(continuation.beam, None) or self._child(parents[continuation.beam])",
        "beam = left.pop(continuation.beam, parents[continuation.beam])",
    ),
    "a beam that is dropped keeps its blocks": (
        SCHEDULER,
        "            self.blocks.release(beam.blocks)\n",
        "            pass\n",
    ),
    "beams do not wait for each other": (SCHEDULER, "if len(beams.rows) < len(group.sequences):", "if False:"),
    "hypotheses are not normalised": (BEAMS, "length**self._sampling.length_penalty", "1"),
    "live beams alone must agree": (BEAMS, ", *(one.tokens for one in self.hypotheses[: self._sampling.n])", ""),
    "a hypothesis may come from beyond the first beams": (
        BEAMS,
        "elif rank < width and not closed:",
        "elif not closed:",
    ),
    # sessions
    "a session pins nothing": (SCHEDULER, "if group.request.session is not None and", "if False and"),
    "a session keeps what it had, too": (PINS, "        self.drop(name)\n        self._tables", "        self._tables"),
    "pins have no limit": (PINS, "while self.num_blocks > self._limit:", "while False:"),
    "pins never yield": (PINS, "        if not self._tables:\n", "        if True:\n"),
    "a second turn may come at once": (SESSIONS, "if session and session.busy:", "if False:"),
    "sessions never expire": (SESSIONS, "idle.expires <= self._clock()", "False"),
    "a failed turn ends the session": (SESSIONS, "forget=self.is_first", "forget=True"),
    "a session that ends keeps its blocks": (
        SESSIONS,
        "        if forget:\n            self._unpin(turn.name)\n",
        "",
    ),
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
    command += ["tests/test_block_manager.py", "tests/test_scheduler.py", "tests/test_sessions.py"]
    command += ["tests/test_adapter_slots.py"]
    command += ["tests/test_beams.py"] if file == BEAMS else []
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that never ends is found, too
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 1, done.stdout[-2000:]
