"""Mistakes that the tests of sharing must find, and a quick way to see whether storms do: in one process, which imports
the scheduler anew with each of them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
BLOCKS, CONTENT, SCHEDULER, TABLES, SEQUENCE, BEAMS, PINS, PLAN, WAITING, ACCOUNTS = (
    f"scheduling/{module}.py"
    for module in (
        "block_manager",
        "content",
        "scheduler",
        "tables",
        "sequence",
        "beam_search",
        "pins",
        "plan",
        "waiting",
        "accounts",
    )
)
SESSIONS = "server/sessions.py"
RESULT = "scheduling/step_result.py"
REQUEST, DISK = "api/request.py", "memory/block_file.py"

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
    "an evicted block is still found": (CONTENT, "        del self._blocks[entry]\n", ""),
    "an evicted block keeps its key": (
        BLOCKS,
        "        self.index.remove(block)\n        self._fresh.pop(block, None)\n        self.counters",
        "        self._fresh.pop(block, None)\n        self.counters",
    ),
    "who lets go of a shared block leaves it shared": (BLOCKS, "            self._shared -= 1\n", "            pass\n"),
    "a block may be released twice": (BLOCKS, " or not self._references[block]:", ":"),
    "who finds too few blocks gets those": (
        BLOCKS,
        "        if count > self.num_available:\n            return None\n",
        "        count = min(count, self.num_available)\n",
    ),
    "who finds no room has evicted": (
        BLOCKS,
        "        if count > self.num_available:\n            return None\n",
        "        if count > self.num_available:\n"
        "            self.release(self._allocate(self.num_available))\n"
        "            return None\n",
    ),
    "tokens are not compared": (
        CONTENT,
        "return self._entries.get((before, tokens))",
        "return next((one for (above, _), one in self._entries.items() if above == before), None)",
    ),
    "the last of a block's tokens is not compared": (
        CONTENT,
        "return self._entries.get((before, tokens))",
        "return next((one for at, one in self._entries.items() if (at[0], at[1][:-1]) == (before, tokens[:-1])), None)",
    ),
    "what is before a block is not compared": (
        CONTENT,
        "return self._entries.get((before, tokens))",
        "return next((one for one in self._entries.values() if one.tokens == tokens), None)",
    ),
    "one content has two entries": (CONTENT, "            if entry is None:\n", "            if True:\n"),
    "entries are kept for ever": (CONTENT, "= WeakValueDictionary()", "= {}"),
    "adapters are forgotten": (REQUEST, 'self.adapter.digest if self.adapter else b""', 'b""'),
    "what is in a file is not compared": (DISK, "if (origin, tokens) != entry.prefix:", "if False:"),
    "the last block of a file alone is compared": (
        DISK,
        "if (origin, tokens) != entry.prefix:",
        "if tuple(tokens[-len(entry.tokens) :]) != entry.tokens:",
    ),
    "the origin of a file is not compared": (
        DISK,
        "if (origin, tokens) != entry.prefix:",
        "if tokens != entry.prefix[1]:",
    ),
    "a file of others turns the tier off": (
        DISK,
        "if _key(origin, tokens, len(entry.tokens)) != entry.key:",
        "if True:",
    ),
    "what was computed wrongly is still found": (
        BLOCKS,
        "entry = self.index.remove(block)",
        "entry = self.index.entry(block)",
    ),
    "what was computed wrongly is found on the host": (BLOCKS, "self.host._discard(entry)", "pass"),
    "what was computed wrongly takes its block with it": (
        BLOCKS,
        "                del self._cached[block]\n                self._free.append(block)\n",
        "                del self._cached[block]\n",
    ),
    "an evicted block is still somebody's child": (
        CONTENT,
        "        del siblings[bisect_left(siblings, (entry.tokens, block))]\n",
        "",
    ),
    "salts are forgotten": (REQUEST, "Origin(self.sampling.cache_salt, ", 'Origin("", '),
    "a hit may leave nothing to compute": (BLOCKS, "len(tokens) - 1, chain", "len(tokens), chain"),
    "a partial hit is one token too long": (
        BLOCKS,
        "return (BlockLocation(block, there[1] > here[1]), length) if length",
        "return (BlockLocation(block, there[1] > here[1]), length + 1) if length",
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
    "a copy on write is not made": (
        TABLES,
        "            draft.copy(group, copy)\n        return num_tokens",
        "        return num_tokens",
    ),
    "copies are not handed to the step": (
        PLAN,
        "_flat(self.copies), tuple",
        "(), tuple",
    ),
    "a block is known before it is full": (
        TABLES,
        "range(first, sequence.committed // size)",
        "range(first, min(len(sequence.blocks), -(-sequence.committed // size)))",
    ),
    "the victim of a dry pool is the oldest": (
        SCHEDULER,
        "next(reversed(self._running.values()))",
        "next(iter(self._running.values()))",
    ),
    "a preempted group does not compute its prompt again": (
        TABLES,
        "            sequence.computed = sequence.committed = 0\n",
        "",
    ),
    "a preempted group does not fork again": (TABLES, "        group.forked = len(group.sequences) == 1\n", ""),
    "nobody is displaced where all places are taken": (
        SCHEDULER,
        "group.num_seqs > room.seqs",
        "room.seqs < 1",
    ),
    "what a hit brings back counts as available": (TABLES, " + sum(map(self._blocks.is_cached, here))", ""),
    "a copy that leaves no room is made": (
        TABLES,
        "needed + taken > available",
        "needed > available",
    ),
    "priorities are forgotten": (SEQUENCE, "        return self.request.sampling.priority\n", "        return 0\n"),
    "an equal displaces an equal": (SCHEDULER, "one.priority > group.priority]", "one.priority >= group.priority]"),
    "an equal takes the slot of an equal": (
        SCHEDULER,
        "if ones[0].priority > group.priority)",
        "if ones[0].priority >= group.priority)",
    ),
    "who uses the slot that is to come free is not looked at": (
        SCHEDULER,
        "in slot_users or [self._last]",
        "in [self._last]",
    ),
    # fair tenants
    "a prompt counts for nobody": (ACCOUNTS, "        account.served += tokens\n", ""),
    "an output counts for nobody": (SCHEDULER, "account.served += len(chunk.draws)", "account.served += 0"),
    "a tenant that was away has credit": (ACCOUNTS, "if not account.waiting:", "if False:"),
    "a tenant that comes begins where another did": (ACCOUNTS, "min(tokens, MOST_BEHIND)", "0"),
    "a tenant that comes waits for what another was let in with": (ACCOUNTS, "min(tokens, MOST_BEHIND)", "tokens"),
    "who has nobody waiting is forgotten": (ACCOUNTS, "if not account.open:", "if not account.waiting:"),
    "tenants are kept for ever": (ACCOUNTS, "if not account.open:", "if False:"),
    "the order of tenants is that of their first requests": (
        WAITING,
        "elif order == (now := _order(line[0])):",
        "elif order == (now := _order(line[0])) or True:",
    ),
    "who was pushed out waits for its tenant's turn": (
        WAITING,
        "    return group.priority, -1, group.turn\n",
        "    return group.priority, group.account.served, group.turn\n",
    ),
    "who was let in first is pushed out for the older": (
        SEQUENCE,
        "return self.priority, self.turn",
        "return self.priority, self.key",
    ),
    "one is displaced for nothing": (
        SCHEDULER,
        "        needed = (demand or self._tables.demand(group)).blocks\n        return needed <=",
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
    "what is drawn after the end counts": (
        SCHEDULER,
        "if group is not None and not sequence.ended:",
        "if group is not None:",
    ),
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
        "            self._tables.seal(sequence, chunk.start + chunk.length)\n",
    ),
    # guesses
    "what follows a wrong guess is taken": (RESULT, "sampled[accepted] == draft_tokens[accepted]:", "True:"),
    "the keys of wrong guesses count": (
        TABLES,
        "        sequence.computed = sequence.committed + len(tokens) - 1\n",
        "",
    ),
    "blocks of wrong guesses are kept": (
        TABLES,
        "            self._blocks.drop(sequence.blocks.pop())\n            group.blocks_new -= 1\n",
        "            break\n",
    ),
    "guesses go past the last token": (SCHEDULER, "sequence.generated - 1\n", "sequence.generated\n"),
    "what arrives from the host is held for ever": (BLOCKS, "            self.unlock(move.target)\n", ""),
    # the host
    "what did not arrive is known": (BLOCKS, "if done and move.entry and", "if move.entry and"),
    "what did not arrive on the host is known there": (
        BLOCKS,
        "if not done and self.host.index",
        "if False and self.host.index",
    ),
    "what comes from disk is held for ever": (
        BLOCKS,
        "        self.drop(block)\n        return block\n",
        "        return block\n",
    ),
    "what comes from disk may be there twice": (
        BLOCKS,
        "if self.index.find(entry) is not None or not self.num_available:",
        "if not self.num_available:",
    ),
    "what the host has goes there once more": (BLOCKS, "self.host.index.find(entry) is None and ", ""),
    "what comes back can be evicted on the host": (
        BLOCKS,
        "                self.host.lock(block)\n                moves",
        "                self.host.hold(block)\n                moves",
    ),
    "room on the host is not counted": (
        BLOCKS,
        "for block in table}) > self.host.num_available:",
        "for block in table}) > self.host.num_blocks:",
    ),
    "what is evicted does not go to the host": (BLOCKS, "if self.host and self.host.caching and", "if False and"),
    "moves to the host are not handed to the step": (PLAN, "blocks.take_moves_out(), _flat", "(), _flat"),
    "moves from the host are not handed to the step": (PLAN, "_flat(self.moves_in), ", "(), "),
    "what arrives from the host is not known": (
        BLOCKS,
        "if done and move.entry and self.caching",
        "if False",
    ),
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
        TABLES,
        "            self._blocks.host.release(sequence.swapped)\n",
        "            sequence.swapped.clear()\n",
    ),
    "moving costs nothing": (TABLES, "2 * len(blocks) * self._costs.move", "0 * self._costs.token"),
    "what a failed step moved out counts as moved": (SCHEDULER, "lost.intersection(sequence.swapped)", "False"),
    # beams
    "a beam goes on once only": (
        TABLES,
        "beam = left.pop(continuation.beam, None) or self._child(parents[continuation.beam])",
        "beam = left.pop(continuation.beam, parents[continuation.beam])",
    ),
    "a beam that is dropped keeps its blocks": (
        TABLES,
        "            self._blocks.release(beam.blocks)\n",
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

# Storms know nothing of these, or meet them rarely: other tests find them.
RARE = {
    "the victim of a dry pool is the oldest",
    "nobody is displaced where all places are taken",
    "priorities are forgotten",
    "an equal displaces an equal",
    "an equal takes the slot of an equal",
    "who uses the slot that is to come free is not looked at",
    "a prompt counts for nobody",
    "an output counts for nobody",
    "a tenant that was away has credit",
    "a tenant that comes begins where another did",
    "a tenant that comes waits for what another was let in with",
    "the order of tenants is that of their first requests",
    "who was let in first is pushed out for the older",
    "one is displaced for nothing",
    "a sequence computes on past its last token",
    "who computes for others books for nobody once it has ended",
    "beams and guides go on before it is known from where",
    "guesses go past the last token",
    "moving costs nothing",
    "hypotheses are not normalised",
    "a hypothesis may come from beyond the first beams",
    "a session pins nothing",
    "a second turn may come at once",
    "sessions never expire",
    "a failed turn ends the session",
    "a session that ends keeps its blocks",
    "what is in a file is not compared",
    "the last block of a file alone is compared",
    "the origin of a file is not compared",
    "a file of others turns the tier off",
}
ENDLESS = {
    "an equal displaces an equal",
    "an equal takes the slot of an equal",
    "the victim of a dry pool is the oldest",
}

NEW_EACH_TIME = ("paged_backend", "tests.support.scheduler_stress", "tests.support.shadow", "tests.support.pool_")
MOST_SECONDS = 60


def changed(mistake: str) -> str:
    """The module that has it."""
    file, right, wrong = MUTANTS[mistake]
    source = (ROOT / "paged_backend" / file).read_text()
    assert source.count(right) == 1, "the code that the mistake is about has changed"
    return source.replace(right, wrong)


def found_by(mistake: str | None, first_seed: int = 0, most_seeds: int = 120) -> str | None:
    """What is first to find a mistake, or to fail where there is none; None: nothing is."""
    with _made(mistake) if mistake else contextlib.nullcontext():
        rules, storms = (
            importlib.import_module(f"tests.support.{name}") for name in ("pool_machine", "scheduler_stress")
        )
        for seed in range(first_seed, first_seed + most_seeds):
            try:
                if mistake is None or MUTANTS[mistake][0] in (BLOCKS, CONTENT):
                    rules.play_seeds(range(seed, seed + 1))
                storms.storm(**storms.weather(seed))
            except Exception as error:
                return f"seed {seed}: {error!r}"
    return None


@contextlib.contextmanager
def _made(mistake: str) -> Iterator[None]:
    """Whatever is imported within it has the mistake; and MOST_SECONDS, for one that never ends."""
    file = MUTANTS[mistake][0]
    name, path = f"paged_backend.{file[:-3].replace('/', '.')}", ROOT / "paged_backend" / file
    module = _Changed(name, path, changed(mistake))
    _forget_imports()
    sys.meta_path.insert(0, module)
    before = signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        sys.meta_path.remove(module)
        _forget_imports()


def _forget_imports() -> None:
    for name in list(sys.modules):
        if name.startswith(NEW_EACH_TIME):
            del sys.modules[name]


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("it never ends")


class _Changed(SourceFileLoader):
    """Finds one module, and loads it from this source."""

    def __init__(self, name: str, path: Path, source: str):
        super().__init__(name, str(path))
        self._source = source

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def get_code(self, fullname: str) -> object:
        return compile(self._source, self.path, "exec")
