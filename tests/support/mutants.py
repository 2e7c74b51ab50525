"""Mutants: faults in the scheduler, the block manager, sessions and the disk tier, which the tests must detect.

`found_by` runs the stress tests against one mutant within this process, importing the scheduler anew.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import signal
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
MASKS = "scheduling/mask_budget.py"
ACCOUNTS, ADMISSION, BEAM_COMMIT, BEAM_SEARCH, BLOCKS, BUILDER, CACHE, COMMIT, CONTENT, DEMAND = (
    f"scheduling/{module}.py"
    for module in (
        "accounts",
        "batch_admission",
        "beam_commit",
        "beam_search",
        "block_manager",
        "plan_builder",
        "prefix_cache",
        "step_commit",
        "content",
        "block_demand",
    )
)
OFFLOAD, PINS, PLANNER, POOL, REGISTRY, RESULT, SCHEDULER, SEQUENCE, TABLES, WAITING = (
    f"scheduling/{module}.py"
    for module in (
        "host_offload",
        "pins",
        "chunk_planner",
        "block_pool",
        "registry",
        "step_result",
        "scheduler",
        "sequence",
        "block_tables",
        "waiting_queue",
    )
)
WINDOWED, LAYOUT, STATES = "scheduling/windowed_pool.py", "api/block_layout.py", "scheduling/state_slots.py"
SESSIONS = "server/prompts/sessions.py"
SCORES, SCORE_CACHE = "scheduling/block_scores.py", "scheduling/score_cache.py"
REQUEST, DISK = "api/request.py", "memory/block_file.py"
POOL_MODULES = (
    BLOCKS,
    CACHE,
    CONTENT,
    OFFLOAD,
    POOL,
    SCORES,
)  # those that the rules of the pool machine exercise as well

MUTANTS = {  # name: (file, source, replacement)
    # references, free list and LRU list
    "a freed block keeps its reference": (POOL, "        self._references[block] -= 1\n", ""),
    "a shared block is freed with its first holder": (
        POOL,
        "        elif self._references[block] == 0:",
        "        if self._references[block] <= 1:",
    ),
    "touch does not add a reference": (POOL, "        self._references[block] += 1\n        if", "        if"),
    "a touched block stays evictable": (POOL, "        self._cached.pop(block, None)\n", ""),
    "the most recently used cached block is evicted": (POOL, "popitem(last=False)", "popitem(last=True)"),
    "a table is freed head first": (POOL, "for block in reversed(table):", "for block in table:"),
    "an evicted block is still found": (CONTENT, "        del self._blocks[entry]\n", ""),
    "an evicted block stays indexed": (
        POOL,
        "            self._on_evict(block)\n        self.index.remove(block)\n",
        "            self._on_evict(block)\n",
    ),
    "a block that is shared no more is counted as shared": (
        POOL,
        "            self.num_shared -= 1\n",
        "            pass\n",
    ),
    "double free is accepted": (POOL, " or not self._references[block]:", ":"),
    "allocate returns fewer blocks": (
        POOL,
        "        if count > self.num_available:\n            return None\n",
        "        count = min(count, self.num_available)\n",
    ),
    "a failed allocation evicts": (
        POOL,
        "        if count > self.num_available:\n            return None\n",
        "        if count > self.num_available:\n"
        "            self.free_table(allocate_counted(self, self.num_available))\n"
        "            return None\n",
    ),
    # content
    "tokens are not compared": (
        CONTENT,
        "return self._entries.get((parent, tokens))",
        "return next((one for (above, _), one in self._entries.items() if above == parent), None)",
    ),
    "the last token of a block is not compared": (
        CONTENT,
        "return self._entries.get((parent, tokens))",
        "return next((one for at, one in self._entries.items() if (at[0], at[1][:-1]) == (parent, tokens[:-1])), None)",
    ),
    "the parent of a block is not compared": (
        CONTENT,
        "return self._entries.get((parent, tokens))",
        "return next((one for one in self._entries.values() if one.tokens == tokens), None)",
    ),
    "equal content gets two entries": (CONTENT, "            if entry is None:\n", "            if True:\n"),
    "entries are kept for ever": (CONTENT, "= WeakValueDictionary()", "= {}"),
    "adapters share prefixes": (REQUEST, 'self.adapter.digest if self.adapter else b""', 'b""'),
    "the content of a file is not compared": (DISK, "if (origin, tokens) != entry.prefix:", "if False:"),
    "only the last block of a file is compared": (
        DISK,
        "if (origin, tokens) != entry.prefix:",
        "if tuple(tokens[-len(entry.tokens) :]) != entry.tokens:",
    ),
    "the origin of a file is not compared": (
        DISK,
        "if (origin, tokens) != entry.prefix:",
        "if tokens != entry.prefix[1]:",
    ),
    "a key collision turns the disk tier off": (
        DISK,
        "if _key(origin, tokens, len(entry.tokens)) != entry.key:",
        "if True:",
    ),
    "invalidated content is still found": (
        CACHE,
        "entry = self._pool.index.remove(block)",
        "entry = self._pool.index.entry(block)",
    ),
    "invalidated content is still found on the host": (
        CACHE,
        "            self._host.forget(entry)\n",
        "            pass\n",
    ),
    "invalidated content loses its block": (
        POOL,
        "                del self._cached[block]\n                self._free.append(block)\n",
        "                del self._cached[block]\n",
    ),
    "an evicted block is still a child": (
        CONTENT,
        "        del siblings[bisect_left(siblings, (entry.tokens, block))]\n",
        "",
    ),
    "cache salts share prefixes": (REQUEST, "Origin(self.sampling.cache_salt, ", 'Origin("", '),
    "a hit covers all tokens": (CACHE, "len(tokens) - 1, chain", "len(tokens), chain"),
    "a partial hit is one token too long": (
        CACHE,
        "return (BlockLocation(block, host[1] > device[1]), length) if length",
        "return (BlockLocation(block, host[1] > device[1]), length + 1) if length",
    ),
    "children are searched on one side only": (CONTENT, "max(0, place - 1) : place + 1", "place : place + 1"),
    # copy-on-write and forks
    "the source of a copy is not locked": (
        POOL,
        "        self.touch(block)\n        self._transfers[block] += 1\n",
        "        self._transfers[block] += 1\n        self._references[block] += 1\n",
    ),
    "the source of a copy stays locked": (
        BLOCKS,
        "            self.pool.unlock(copy.source)\n",
        "            pass\n",
    ),
    "sources of copies count as shared": (POOL, " - self._transfers[block] > 1", " > 1"),
    "no block is ever shared": (POOL, " - self._transfers[block] > 1", " - self._transfers[block] > 99"),
    "a fork adds no references": (
        BLOCKS,
        "        for index, block in enumerate(table):\n            self.pool.touch(block, index >= start)\n"
        "        return list(table)",
        "        return list(table)",
    ),
    "a shared block is not copied on write": (
        TABLES,
        "            builder.add_copies(sequence.key, (copy,))\n",
        "",
    ),
    "copies are missing from the plan": (
        BUILDER,
        "copies=tuple(chain.from_iterable(self._copies.values()))",
        "copies=()",
    ),
    "a block is cached before it is full": (
        TABLES,
        "range(first, sequence.committed // size)",
        "range(first, min(len(sequence.blocks), -(-sequence.committed // size)))",
    ),
    # preemption and priorities
    "the oldest request is preempted": (
        REGISTRY,
        "next(reversed(self.running.values()))",
        "next(iter(self.running.values()))",
    ),
    "a preempted group does not recompute its prompt": (
        TABLES,
        "            sequence.computed = sequence.committed = sequence.window_start = 0\n",
        "",
    ),
    "a preempted group does not fork again": (TABLES, "        group.forked = len(group.sequences) == 1\n", ""),
    "a full batch is never preempted": (
        ADMISSION,
        "group.num_seqs > capacity.num_seqs",
        "capacity.num_seqs < 1",
    ),
    "cached blocks of a hit count as available": (DEMAND, " + cached)", ")"),
    "a partial hit is copied without room for it": (
        DEMAND,
        "needed + locked > available",
        "needed > available",
    ),
    "priorities are ignored": (SEQUENCE, "        return self.request.sampling.priority\n", "        return 0\n"),
    "a request of equal priority is preempted": (
        ADMISSION,
        "one.priority > group.priority]",
        "one.priority >= group.priority]",
    ),
    "a slot user of equal priority is preempted": (
        ADMISSION,
        "if ones[0].priority > group.priority)",
        "if ones[0].priority >= group.priority)",
    ),
    "other requests than the slot users are preempted": (
        ADMISSION,
        "in slot_users or [self._requests.last_running]",
        "in [self._requests.last_running]",
    ),
    # fair tenants
    "prompt tokens are not counted": (ACCOUNTS, "        account.served_tokens += tokens\n", ""),
    "output tokens are not counted": (
        SCHEDULER,
        "account.served_tokens += len(chunk.sampled_sequences)",
        "account.served_tokens += 0",
    ),
    "an idle tenant gains credit": (ACCOUNTS, "if not account.num_waiting:", "if False:"),
    "a new tenant starts where the last one did": (ACCOUNTS, "min(tokens, MAX_HEAD_START)", "0"),
    "a new tenant waits for the last one's prompt": (ACCOUNTS, "min(tokens, MAX_HEAD_START)", "tokens"),
    "a tenant without waiting requests is dropped": (
        ACCOUNTS,
        "if not account.num_open:",
        "if not account.num_waiting:",
    ),
    "accounts are kept for ever": (ACCOUNTS, "if not account.num_open:", "if False:"),
    "the order of tenants is never updated": (
        WAITING,
        "elif order == (current := _order(line[0])):",
        "elif order == (current := _order(line[0])) or True:",
    ),
    "a preempted request waits for its tenant": (
        WAITING,
        "    return group.priority, -1, group.admission_index\n",
        "    return group.priority, group.account.served_tokens, group.admission_index\n",
    ),
    "running requests are ranked by arrival": (
        SEQUENCE,
        "return self.priority, self.admission_index",
        "return self.priority, self.key",
    ),
    "a request is preempted in vain": (
        ADMISSION,
        "        needed = (demand or self._demand.demand(group)).num_blocks\n        return needed <=",
        "        return 0 <=",
    ),
    "a block is spilled again and again": (
        OFFLOAD,
        "            del self._unspilled[block]\n",
        "            break\n",
    ),
    "all samples have the same seed": (SEQUENCE, "self.request.seed + self.index", "self.request.seed"),
    "a finished sample stays in its group": (REGISTRY, "        group.sequences.remove(sequence)\n", ""),
    # a step in flight
    "a sequence computes past its last token": (
        PLANNER,
        " or (in_flight and sequence.has_all_tokens)",
        "",
    ),
    "a sequence takes part in a step without its mask": (
        PLANNER,
        "sequence.needs_mask or ",
        "",
    ),
    "the time for masks has no limit": (
        MASKS,
        "if self._left <= 0:",
        "if False:",
    ),
    "tokens after the end are returned": (
        COMMIT,
        "if group is not None and not sequence.ended:",
        "if group is not None:",
    ),
    "blocks are cached after the end": (COMMIT, "if not sequence.ended:", "if True:"),
    "forks are not committed if the leader has ended": (
        COMMIT,
        "for sequence in (chunk.sequence, *chunk.forks):",
        "for sequence in () if chunk.sequence.ended else (chunk.sequence, *chunk.forks):",
    ),
    "beams and guides do not wait for results": (
        SCHEDULER,
        "        return self._proposer is not None or any(group.needs_previous_result for group in running)\n",
        "        return self._proposer is not None\n",
    ),
    "a block is cached before its last token is sampled": (
        SCHEDULER,
        "            sequence.computed = chunk.start + chunk.length\n",
        "            sequence.computed = chunk.start + chunk.length\n"
        "            self._tables.commit(sequence, chunk.start + chunk.length)\n",
    ),
    # speculation
    "rejected draft tokens are accepted": (RESULT, "sampled[accepted] == draft_tokens[accepted]:", "True:"),
    "rejected draft tokens count as computed": (
        TABLES,
        "        sequence.computed = sequence.committed + len(tokens) - 1\n",
        "",
    ),
    "blocks of rejected draft tokens are kept": (
        TABLES,
        "            self._pool.free(sequence.blocks.pop(), True)\n            group.block_usage.new -= 1\n",
        "            break\n",
    ),
    "draft tokens go past max_tokens": (PLANNER, "sequence.generated - 1\n", "sequence.generated\n"),
    "the target of a move in stays locked": (OFFLOAD, "            self._pool.unlock(move.target)\n", ""),
    # the host
    "a failed move in is indexed": (OFFLOAD, "if done and move.entry and", "if move.entry and"),
    "a failed move out stays indexed": (
        OFFLOAD,
        "if not done and self._host.index",
        "if False and self._host.index",
    ),
    "a block from disk stays referenced": (
        OFFLOAD,
        "        self._host.free(block)\n        return block\n",
        "        return block\n",
    ),
    "a block from disk is added twice": (
        OFFLOAD,
        "        if self._host.index.find(entry) is not None:\n            return None\n        blocks",
        "        blocks",
    ),
    "content that the host has is spilled again": (OFFLOAD, "self._host.index.find(entry) is None and ", ""),
    "the source of a swap-in can be evicted": (
        OFFLOAD,
        "                self._host.lock(block)\n",
        "                self._host.touch(block)\n",
    ),
    "swap-out ignores the host's room": (
        OFFLOAD,
        "if needed > self._host.num_available:",
        "if needed > self._host.num_blocks:",
    ),
    "evicted blocks are not offloaded": (OFFLOAD, "if self._host and self._host.caching and", "if False and"),
    "moves out are missing from the plan": (BUILDER, "moves_out=blocks.offload.take_moves_out()", "moves_out=()"),
    "moves in are missing from the plan": (
        BUILDER,
        "moves_in=tuple(chain.from_iterable(self._moves_in.values()))",
        "moves_in=()",
    ),
    "a finished move in is not indexed": (
        OFFLOAD,
        "if done and move.entry and self._pool.caching",
        "if False",
    ),
    "a partial hit from the host is indexed": (BLOCKS, "._replace(entry=None)", ""),
    "blocks of a hit on the host are not locked": (
        BLOCKS,
        "                self._lock(location)\n",
        "                pass\n",
    ),
    "the source of a partial hit is locked too late": (
        BLOCKS,
        "        if hit.partial:\n            self._lock(hit.partial)\n        table, moves, copies = [], [], []\n"
        "        for index, location in enumerate(hit.blocks):\n",
        "        table, moves, copies = [], [], []\n        for index, location in enumerate(hit.blocks):\n"
        "            if hit.partial and location is hit.blocks[-1]:\n                self._lock(hit.partial)\n",
    ),
    "the target of a move out can be evicted": (OFFLOAD, "        self._host.lock(blocks[0])\n", ""),
    "a shared block is swapped out twice": (
        OFFLOAD,
        "            if block in targets:\n                self._host.touch(targets[block])\n            else:",
        "            if True:",
    ),
    "a shared block is swapped in with one reference": (
        OFFLOAD,
        "        for block, in_window in places:\n            self._pool.touch",
        "        for block, in_window in dict(places).items():\n            self._pool.touch",
    ),
    "blocks of a swapped-out request stay on the host": (
        TABLES,
        "            self._blocks.host.free_table(sequence.host_blocks)\n",
        "            sequence.host_blocks.clear()\n",
    ),
    "moves cost nothing": (TABLES, "2 * moves >= tokens", "0 >= tokens"),
    "a failed swap-out counts as done": (SCHEDULER, "lost.intersection(one.host_blocks)", "False"),
    # beam search
    "a beam has one continuation only": (
        TABLES,
        "beam = left.pop(continuation.beam, None) or self._fork_beam(parents[continuation.beam])",
        "beam = left.pop(continuation.beam, parents[continuation.beam])",
    ),
    "a dropped beam keeps its blocks": (
        TABLES,
        "            self.free_sequence(parents[index])\n",
        "            pass\n",
    ),
    "beams do not wait for each other": (BEAM_COMMIT, "if len(beams.candidates) < len(group.sequences):", "if False:"),
    "hypotheses are not normalized": (BEAM_SEARCH, "length**self._sampling.length_penalty", "1"),
    "only live beams have to agree": (
        BEAM_SEARCH,
        ", *(one.tokens for one in self.hypotheses[: self._sampling.n])",
        "",
    ),
    "any continuation may become a hypothesis": (
        BEAM_SEARCH,
        "elif rank < width and not closed:",
        "elif not closed:",
    ),
    # sliding windows
    "a block leaves the window one token early": (LAYOUT, "position + 1 - self.window", "position + 2 - self.window"),
    "window pages are freed before their last reader has run": (
        TABLES,
        "layout.kept_from(end)",
        "layout.kept_from(len(sequence.tokens))",
    ),
    "window pages are freed with their first reader": (
        WINDOWED,
        "        if not self._window_references[block]:\n            if self.index",
        "        if True:\n            if self.index",
    ),
    "freed window pages are lost": (
        WINDOWED,
        "        self._free_pages += self._pages[block, base:].tolist()\n",
        "",
    ),
    "window pages in use can be evicted": (WINDOWED, "                del self._cached[~block]\n", ""),
    "a prefix without its window is a hit": (CACHE, "if count - first <= streaks[count]:", "if count:"),
    "a partial hit needs no window pages": (
        CACHE,
        "        if device[1] and device[0] in self._pool.trimmed:\n",
        "        if False:\n",
    ),
    "content without window pages keeps its place": (
        BLOCKS,
        "        if replaced is not None:\n",
        "        if False:\n",
    ),
    "a block is swapped out without its window pages": (
        OFFLOAD,
        "(trimmed or cached not in self._host.trimmed)",
        "True",
    ),
    "a block is swapped in without its window pages": (
        OFFLOAD,
        "(block not in windowed or cached not in self._pool.trimmed)",
        "True",
    ),
    "window pages that will be needed are not counted": (
        DEMAND,
        "base + self._window_total(group)",
        "base",
    ),
    # log probabilities of prompts, and digests
    "scores outlive their block": (CONTENT, "        self.scores.pop(block, None)\n", ""),
    "the first token of a block has the scores of the next one": (
        SCORE_CACHE,
        "return max(0, index * block_size - 1)",
        "return index * block_size",
    ),
    "scores are taken twice": (SCORE_CACHE, "scores.logprobs(num_top)[known:]", "scores.logprobs(num_top)"),
    "scores without enough top tokens are taken": (SCORES, "num_top <= self.num_top and ", ""),
    "scores without fingerprints are taken": (SCORES, "bool(self._fingerprints or not fingerprints)", "True"),
    "top tokens are lost when scores are merged": (
        SCORES,
        "most = max(self, other, key=lambda one: one.num_top)",
        "most = self",
    ),
    "equally likely tokens are in another order": (
        SCORES,
        "sorted(entries, key=lambda entry: (entry.rank, entry.token))[:num_top]",
        "list(entries)[:num_top]",
    ),
    "a position whose scores are needed is a cache hit": (SEQUENCE, "return scored + 1 if", "return scored + 2 if"),
    "a prompt is returned twice": (COMMIT, "            group.scores_prompt = False\n", ""),
    "fingerprints after the end of an output are returned": (
        COMMIT,
        "fingerprints[sampled][: len(delta.token_ids)]",
        "fingerprints[sampled]",
    ),
    # states of recurrent layers
    "a copy of a state is left out": (STATES, "tuple(copies))", "tuple(copies[1:]))"),
    "a hit ends where no state was saved": (
        STATES,
        "            if self.pool.index.find(entries[count - 1]) is not None:\n",
        "            if True:\n",
    ),
    "a sample continues from the zero state": (
        STATES,
        "self._share(parent.state_slot, child)",
        "self._hold(child, allocate_counted(self.pool, 1)[0])",
    ),
    "samples write to the same state": (STATES, "is_shared = self.pool.is_shared(source)", "is_shared = False"),
    "an overwritten checkpoint is found": (
        STATES,
        "            elif self.pool.index.contains(source):\n",
        "            elif False:\n",
    ),
    "checkpoints take the slots of sequences": (
        STATES,
        "        if self._num_spare > 0:",
        "        if self.pool.num_available > 0:",
    ),
    "a slot that a session pins is one of a sequence": (
        STATES,
        " - set(self._pinned.values())) if self._pinned else len(self._holders)",
        ")",
    ),
    "a state with tokens in flight becomes a checkpoint": (STATES, "position == sequence.computed and ", ""),
    "a checkpoint is found although its copy failed": (
        STATES,
        "                if done:\n",
        "                if True:\n",
    ),
    "a state is not moved back on swap-in": (STATES, "                self._moves_in.append(move)\n", ""),
    "a slot of the host is free before its state has left": (
        STATES,
        "                move = StateCopy(source, targets[source])\n",
        "                move = StateCopy(source, targets[source])\n                self.host.free(source)\n",
    ),
    "a state that has not arrived becomes a checkpoint": (
        STATES,
        " and not self._is_arriving(sequence.state_slot)",
        "",
    ),
    "a state that has not arrived is swapped out": (STATES, " and not any(map(self._is_arriving, slots))", ""),
    "a state is moved to a slot of the host that was freed": (
        STATES,
        "if move.target != slot or self.host.is_shared(slot)]",
        "]",
    ),
    "a sequence continues from the state after a rejected token": (STATES, "slots[num_accepted]", "slots[-1]"),
    "a sequence continues from the state before its accepted tokens": (STATES, "slots[num_accepted]", "slots[0]"),
    "the checkpoint before accepted tokens has the state of another position": (
        STATES,
        "index = num_accepted - (sequence.committed - position)",
        "index = num_accepted - 1",
    ),
    "a state whose swap-out failed is read": (SCHEDULER, " or one.host_state_slot in lost_states", ""),
    # sessions
    "a session pins no blocks": (REGISTRY, "if group.request.session is not None and", "if False and"),
    "a session keeps its former blocks pinned": (
        PINS,
        "        self.drop(name)\n        self._tables",
        "        self._tables",
    ),
    "pins have no limit": (PINS, "while self.num_blocks > self._limit:", "while False:"),
    "pins are never dropped for requests": (PINS, "        if not self._tables:\n", "        if True:\n"),
    "a second turn may run at the same time": (SESSIONS, "if session and session.busy:", "if False:"),
    "sessions never expire": (SESSIONS, "idle.expires <= self._clock()", "False"),
    "a failed turn ends the session": (SESSIONS, "forget=self.is_first", "forget=True"),
    "the blocks of an ended session stay pinned": (
        SESSIONS,
        "        if forget:\n            self._unpin(turn.name)\n",
        "",
    ),
}

# The stress tests do not cover these, or meet them rarely: unit tests detect them.
RARE = {
    "scores are taken twice",
    "the oldest request is preempted",
    "a full batch is never preempted",
    "priorities are ignored",
    "a request of equal priority is preempted",
    "a slot user of equal priority is preempted",
    "other requests than the slot users are preempted",
    "prompt tokens are not counted",
    "output tokens are not counted",
    "an idle tenant gains credit",
    "a new tenant starts where the last one did",
    "a new tenant waits for the last one's prompt",
    "the order of tenants is never updated",
    "running requests are ranked by arrival",
    "a request is preempted in vain",
    "a sequence computes past its last token",
    "forks are not committed if the leader has ended",
    "beams and guides do not wait for results",
    "draft tokens go past max_tokens",
    "moves cost nothing",
    "hypotheses are not normalized",
    "any continuation may become a hypothesis",
    "content without window pages keeps its place",
    "a block is swapped in without its window pages",
    "a block is swapped out without its window pages",
    "a checkpoint is found although its copy failed",
    "a state that has not arrived is swapped out",
    "a slot that a session pins is one of a sequence",
    "a state that has not arrived becomes a checkpoint",
    "a state is moved to a slot of the host that was freed",
    "a state whose swap-out failed is read",
    "the checkpoint before accepted tokens has the state of another position",
    "a session pins no blocks",
    "a second turn may run at the same time",
    "sessions never expire",
    "a failed turn ends the session",
    "the blocks of an ended session stay pinned",
    "the content of a file is not compared",
    "only the last block of a file is compared",
    "the origin of a file is not compared",
    "a key collision turns the disk tier off",
}
ENDLESS = {  # the scheduler does not end with these
    "a request of equal priority is preempted",
    "a slot user of equal priority is preempted",
    "the oldest request is preempted",
}

FIRST = 1  # the seed that finds most mutants
LATE = {  # seeds that find the others
    "a failed swap-out counts as done": 67,
    "equally likely tokens are in another order": 25,
    "a prefix without its window is a hit": 12,
    "blocks are cached after the end": 19,
    "a preempted request waits for its tenant": 12,
    "a partial hit is copied without room for it": 14,
    "tokens after the end are returned": 9,
    "a block leaves the window one token early": 6,
    "only live beams have to agree": 6,
    "a partial hit needs no window pages": 4,
    "a shared block is swapped in with one reference": 5,
    "the first token of a block has the scores of the next one": 5,
    "content that the host has is spilled again": 3,
    "all samples have the same seed": 3,
    "blocks of a swapped-out request stay on the host": 5,
    "a tenant without waiting requests is dropped": 3,
    "window pages that will be needed are not counted": 3,
    "beams do not wait for each other": 3,
    "a beam has one continuation only": 3,
    "window pages in use can be evicted": 3,
    "a dropped beam keeps its blocks": 3,
    "a preempted group does not fork again": 3,
    "a shared block is not copied on write": 3,
    "a block is cached before it is full": 3,
    "cached blocks of a hit count as available": 3,
    "a position whose scores are needed is a cache hit": 4,
    "cache salts share prefixes": 3,
    "copies are missing from the plan": 3,
    "a preempted group does not recompute its prompt": 3,
    "a session keeps its former blocks pinned": 3,
    "pins are never dropped for requests": 3,
    "a shared block is swapped out twice": 2,
    "scores without fingerprints are taken": 2,
    "adapters share prefixes": 0,
    "pins have no limit": 0,
}

REIMPORTED = ("paged_backend", "tests.support.scheduler_stress", "tests.support.shadow", "tests.support.pool_",
              "tests.support.states_stress")  # fmt: skip
MAX_SECONDS = 2  # CPU time for a seed, which takes less than one


def mutated_source(mutant: str) -> str:
    """Return the source of the mutant's module."""
    file, original, replacement = MUTANTS[mutant]
    source = (ROOT / "paged_backend" / file).read_text()
    assert source.count(original) == 1, "the source that the mutant replaces has changed"
    return source.replace(original, replacement)


def found_by(mutant: str | None, seeds: Iterable[int]) -> str | None:
    """Return what detects a mutant first; None if nothing does. Without a mutant, return what fails."""
    with _installed(mutant) if mutant else contextlib.nullcontext(), _limited():
        rules, load, states = (
            importlib.import_module(f"tests.support.{name}")
            for name in ("pool_machine", "scheduler_stress", "states_stress")
        )
        for seed in seeds:
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
            try:
                if mutant is None or MUTANTS[mutant][0] in POOL_MODULES:
                    rules.play_seeds(range(seed, seed + 1))
                if mutant is None or MUTANTS[mutant][0] == STATES:
                    states.run_states_stress(seed)
                for conditions in (load.CONDITIONS, load.WINDOWED, load.PIPELINED):
                    load.run_stress(**load.random_conditions(seed, conditions))
            except Exception as error:
                return f"seed {seed}: {error!r}"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    return None


@contextlib.contextmanager
def _installed(mutant: str) -> Iterator[None]:
    """Import the mutant in place of its module."""
    file = MUTANTS[mutant][0]
    name, path = f"paged_backend.{file[:-3].replace('/', '.')}", ROOT / "paged_backend" / file
    loader = _MutantLoader(name, path, mutated_source(mutant))
    _forget_imports()
    sys.meta_path.insert(0, loader)
    try:
        yield
    finally:
        sys.meta_path.remove(loader)
        _forget_imports()


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise TimeoutError when the timer of CPU time expires: with some mutants the scheduler does not end."""
    before = signal.signal(signal.SIGPROF, _out_of_time)
    try:
        yield
    finally:
        signal.signal(signal.SIGPROF, before)


def _forget_imports() -> None:
    for name in list(sys.modules):
        if name.startswith(REIMPORTED):
            del sys.modules[name]


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"still running after {MAX_SECONDS} s of CPU time")


class _MutantLoader(SourceFileLoader):
    """Finds one module, and loads it from the given source."""

    def __init__(self, name: str, path: Path, source: str):
        super().__init__(name, str(path))
        self._source = source

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def get_code(self, fullname: str) -> object:
        return compile(self._source, self.path, "exec")
