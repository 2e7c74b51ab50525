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
ACCOUNTS, BEAM_SEARCH, GROUP, MASKS, PLAN, SCHEDULER, WAITING = (
    f"scheduling/{module}.py"
    for module in ("waiting_queue", "beam_search", "group", "budgets", "plan", "scheduler", "waiting_queue")
)
BLOCKS, CONTENT, LEDGER, PAGES, SEQUENCE, STATES = (
    f"kv/{module}.py" for module in ("blocks", "content", "ledger", "pages", "sequence", "states")
)
LAYOUT, REQUEST, TOKEN_OUTPUTS, SESSIONS, DISK, STORES = (
    "api/block_layout.py",
    "api/request.py",
    "api/token_outputs.py",
    "server/prompts/sessions.py",
    "kv/stores/block_file.py",
    "engine/prefix_stores.py",
)

MUTANTS = {  # name: (file, source, replacement)
    # references, free runs and LRU list
    "a freed block keeps its reference": (PAGES, "        self._references[block] -= 1\n", ""),
    "a shared block is freed with its first holder": (
        PAGES,
        "        elif self._references[block] == 0:",
        "        if self._references[block] <= 1:",
    ),
    "touch does not add a reference": (PAGES, "        self._references[block] += 1\n        if", "        if"),
    "a touched block stays evictable": (
        PAGES,
        "            del self._cached[block]\n            self._count_cached(self._kinds[block], -1)\n",
        "            pass\n",
    ),
    "the most recently used cached block is evicted": (
        PAGES,
        "next(iter(self._cached))",
        "next(reversed(self._cached))",
    ),
    "a table is freed head first": (PAGES, "for block in reversed(table):", "for block in table:"),
    "an evicted block is still found": (CONTENT, "        del self._blocks[entry]\n", ""),
    "an evicted block stays indexed": (
        PAGES,
        "        self.num_evictions += 1\n        self.forget(block)\n",
        "        self.num_evictions += 1\n        del self._cached[block]\n        self._release(block)\n",
    ),
    "a block that is shared no more is counted as shared": (
        PAGES,
        "            self.num_shared -= 1\n",
        "            pass\n",
    ),
    "double free is accepted": (PAGES, " or not self._references[block]:", ":"),
    "allocate returns fewer blocks": (
        PAGES,
        "        if count * self._sizes[kind] > self.num_available:\n            return None\n",
        "        count = min(count, self.num_available // self._sizes[kind])\n",
    ),
    "a failed allocation evicts": (
        PAGES,
        "        if count * self._sizes[kind] > self.num_available:\n            return None\n",
        "        if count * self._sizes[kind] > self.num_available:\n"
        "            while self._cached:\n"
        "                self._evict()\n"
        "            return None\n",
    ),
    "cached pages are miscounted": (
        PAGES,
        "        self._num_cached += change * self._sizes[kind]\n",
        "        self._num_cached += change\n",
    ),
    "one page of a block is freed": (
        PAGES,
        "for page, count in _runs(pages[block].tolist()):",
        "for page, count in _runs([block]):",
    ),
    "a block keeps the kind that it had": (PAGES, "        self._kinds[block] = kind\n", ""),
    "a block keeps the pages that it had": (
        PAGES,
        "                pages[block] = taken\n",
        "                pages[block] = range(block, block + len(taken))\n",
    ),
    "an extent is not continued": (PAGES, "if before != NULL else 0", "if pages else 0"),
    "a claimed run is taken": (
        PAGES,
        "self.longest, self._top(0)",
        "self.longest, self._top(1)",
    ),
    "the page after an ended sequence stays claimed": (
        PAGES,
        "                    self._free.end_growth(page)\n",
        "                    pass\n",
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
    "equal content gets two entries": (CONTENT, "        if entry is None:\n", "        if True:\n"),
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
        BLOCKS,
        "            self.pool.forget(block)\n            self._unspilled.pop(block, None)\n        of_host",
        "            self._unspilled.pop(block, None)\n        of_host",
    ),
    "the last block of invalidated content is found": (
        BLOCKS,
        "        sequence.committed = 0  # so",
        "        pass  # so",
    ),
    "invalidated content is still found on the host": (
        BLOCKS,
        "            self.host.forget(of_host)\n",
        "            pass\n",
    ),
    "invalidated content loses its block": (
        PAGES,
        "                self._count_cached(kind, -1)\n                self._release(block)\n",
        "                self._count_cached(kind, -1)\n",
    ),
    "an evicted block is still a child": (
        CONTENT,
        "        del siblings[bisect_left(siblings, (entry.tokens, block))]\n",
        "",
    ),
    "cache salts share prefixes": (REQUEST, "Origin(self.sampling.cache_salt, ", 'Origin("", '),
    "a hit covers all tokens": (BLOCKS, "self.block_size, num_tokens - 1, ", "self.block_size, num_tokens, "),
    "a partial hit is one token too long": (BLOCKS, "partial_tokens=length)", "partial_tokens=length + 1)"),
    "the last block of a sequence is not cached": (BLOCKS, "        self._cache_last(sequence)\n", ""),
    "a last block without its content is cached": (BLOCKS, "sequence.committed <= sequence.placed or ", ""),
    "a last block that others may write to is cached": (
        BLOCKS,
        "        if any(map(self.pool.is_shared, last)):\n            return\n",
        "",
    ),
    "the same last block is cached twice": (BLOCKS, "        if length < count:\n", "        if True:\n"),
    "the last block of a beam is cached": (BLOCKS, " or sequence.request.sampling.beam_width > 1:", ":"),
    "the copy of a step that fails is cached": (
        BLOCKS,
        "            sequence.placed = sequence.computed\n",
        "            sequence.placed = sequence.committed\n",
    ),
    "cached blocks are evicted for runs without limit": (PAGES, " and len(free) < self._most_free", ""),
    "a last block in use is taken over": (BLOCKS, "on_host or not self.pool.is_cached(block)", "on_host"),
    "a last block with other tokens is taken over": (BLOCKS, "len(entry.tokens) == hit.partial_tokens", "True"),
    "a block that is taken over is still found": (
        BLOCKS,
        "                self.pool.touch(block)\n                self.pool.forget(block)\n",
        "                self.pool.touch(block)\n",
    ),
    "blocks that are not full are written to stores": (
        STORES,
        " and len(move.entry.tokens) == self._blocks.block_size:",
        ":",
    ),
    "children are searched on one side only": (CONTENT, "max(0, place - 1) : place + 1", "place : place + 1"),
    # copy-on-write and forks
    "the source of a copy is not locked": (
        PAGES,
        "        self.touch(block)\n        self._transfers[block] += 1\n",
        "        self._transfers[block] += 1\n        self._references[block] += 1\n",
    ),
    "the source of a copy stays locked": (LEDGER, "            device.unlock(copy.source)\n", "            pass\n"),
    "sources of copies count as shared": (PAGES, " - self._transfers[block] > 1", " > 1"),
    "no block is ever shared": (PAGES, " - self._transfers[block] > 1", " - self._transfers[block] > 99"),
    "a fork adds no references": (
        BLOCKS,
        'not in use"\n            self.pool.touch(block)\n',
        'not in use"\n',
    ),
    "a shared block is not copied on write": (
        LEDGER,
        "        self._copies.setdefault(request, []).append(copy)\n",
        "        self._device.unlock(block)\n",
    ),
    "copies are missing from the plan": (
        LEDGER,
        "Transfers(tuple(self._moves_out), tuple(moves_in), tuple(copies))",
        "Transfers(tuple(self._moves_out), tuple(moves_in), ())",
    ),
    "only one page of a block is copied": (
        LEDGER,
        "tuple(zip(source_pool.pages_of(source), target_pool.pages_of(target), strict=True))",
        "((source, target),)",
    ),
    "a block is cached before it is full": (
        BLOCKS,
        "        full = end // size\n        if full <= first:\n",
        "        full = min(sequence.num_blocks, self.layout.blocks_for(end))\n        if full <= first:\n",
    ),
    # preemption and priorities
    "the oldest request is preempted": (
        SCHEDULER,
        "next(reversed(self._running.values()))",
        "next(iter(self._running.values()))",
    ),
    "a preempted group does not recompute its prompt": (
        BLOCKS,
        "        self.free(sequence)\n        sequence.computed = sequence.committed = 0\n",
        "        self.free(sequence)\n",
    ),
    "a preempted group does not fork again": (
        SCHEDULER,
        "        group.forked = len(group.sequences) == 1\n",
        "",
    ),
    "a full batch is never preempted": (
        SCHEDULER,
        "group.num_seqs > room.num_seqs + ",
        "room.num_seqs < 1 or group.num_seqs > room.num_seqs + ",
    ),
    "cached blocks of a hit count as available": (
        BLOCKS,
        "needed += sum(map(self.pool.is_cached, here)) - len(here)",
        "needed -= len(here)",
    ),
    "a partial hit is copied without room for it": (
        SCHEDULER,
        "self._fits(demand.pages + self.blocks.pages_to_copy_partial(hit), room)",
        "self._fits(demand.pages, room)",
    ),
    "priorities are ignored": (GROUP, "        return self.request.sampling.priority\n", "        return 0\n"),
    "a request of equal priority is preempted": (
        SCHEDULER,
        "other.priority > group.priority]",
        "other.priority >= group.priority]",
    ),
    "a slot user of equal priority is preempted": (
        SCHEDULER,
        "if users[0].priority > group.priority)",
        "if users[0].priority >= group.priority)",
    ),
    "other requests than the slot users are preempted": (
        SCHEDULER,
        "in slot_users or [self._last_running]",
        "in [self._last_running]",
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
        GROUP,
        "return self.priority, self.admission_index",
        "return self.priority, self.key",
    ),
    "a request is preempted in vain": (
        SCHEDULER,
        "        return (demand or self._demand(group)).pages <=",
        "        return 0 <=",
    ),
    "a block is spilled again and again": (
        BLOCKS,
        "            del self._unspilled[block]\n",
        "            break\n",
    ),
    "all samples have the same seed": (SEQUENCE, "self.request.seed + self.index", "self.request.seed"),
    "a finished sample stays in its group": (
        SCHEDULER,
        "        group.sequences.remove(sequence)\n",
        "",
    ),
    # a step in flight
    "a sequence computes past its last token": (
        SCHEDULER,
        " or (in_flight and sequence.has_all_tokens)",
        "",
    ),
    "a sequence takes part in a step without its mask": (
        SCHEDULER,
        "sequence.needs_mask or ",
        "",
    ),
    "the time for masks has no limit": (
        MASKS,
        "if self._left <= 0:",
        "if False:",
    ),
    "tokens after the end are returned": (
        SCHEDULER,
        "if group is not None and not sequence.ended:",
        "if group is not None:",
    ),
    "blocks are cached after the end": (
        SCHEDULER,
        "                    if not sequence.ended:\n",
        "                    if True:\n",
    ),
    "forks are not committed if the leader has ended": (
        SCHEDULER,
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
        "            self.blocks.commit(sequence, chunk.start + chunk.length)\n",
    ),
    # speculation
    "rejected draft tokens are accepted": (PLAN, "sampled[accepted] == draft_tokens[accepted]:", "True:"),
    "rejected draft tokens count as computed": (
        SCHEDULER,
        "            sequence.computed = first + length - 1\n",
        "",
    ),
    "blocks of rejected draft tokens are kept": (
        BLOCKS,
        "excess = max(0, sequence.num_blocks - self.layout.blocks_for(num_tokens))",
        "excess = 0",
    ),
    "draft tokens go past max_tokens": (SCHEDULER, "sequence.generated - 1\n", "sequence.generated\n"),
    "the target of a move in stays locked": (LEDGER, "            device.unlock(move.target)\n", ""),
    # the host
    "a failed move in is indexed": (LEDGER, "if done and move.entry:", "if move.entry:"),
    "a failed move out stays indexed": (
        LEDGER,
        "            if not done:\n",
        "            if False:\n",
    ),
    "a block from disk stays referenced": (
        BLOCKS,
        "        self.host.free(allocated[0])\n        return allocated[0]\n",
        "        return allocated[0]\n",
    ),
    "a block from disk is added twice": (
        BLOCKS,
        "if self.host.find(*key) is not None or (",
        "if (",
    ),
    "content that the host has is spilled again": (
        BLOCKS,
        "if self.host.find(entry, kind) is None and wanted(",
        "if wanted(",
    ),
    "the source of a swap-in can be evicted": (
        BLOCKS,
        "                host.lock(block)\n",
        "                host.touch(block)\n",
    ),
    "swap-out ignores the host's room": (
        BLOCKS,
        "self.num_pages_held(sequences) > self.host.num_available:",
        "self.num_pages_held(sequences) > self.host.num_pages:",
    ),
    "evicted blocks are not offloaded": (
        BLOCKS,
        "if self.host and self.host.caching:",
        "if False:",
    ),
    "moves out are missing from the plan": (
        LEDGER,
        "Transfers(tuple(self._moves_out), ",
        "Transfers((), ",
    ),
    "moves in are missing from the plan": (
        LEDGER,
        "Transfers(tuple(self._moves_out), tuple(moves_in), ",
        "Transfers(tuple(self._moves_out), (), ",
    ),
    "a finished move in is not indexed": (
        LEDGER,
        "            if done and move.entry:\n",
        "            if False:\n",
    ),
    "a partial hit from the host is indexed": (
        BLOCKS,
        "ledger.move_in(key, block, indexed=False, after=after)",
        "ledger.move_in(key, block, after=after)",
    ),
    "blocks of a hit on the host are not locked": (
        BLOCKS,
        "                self._lock(block, on_host=True)\n",
        "                self.host.touch(block)\n",
    ),
    "the source of a partial hit is not locked": (
        BLOCKS,
        "            self._lock(block, on_host=on_host)\n",
        "            (self.host if on_host else self.pool).touch(block)\n",
    ),
    "the target of a move out can be evicted": (LEDGER, "        host.lock(target)\n", ""),
    "a shared block is swapped out twice": (
        BLOCKS,
        "            if block in targets:\n                self.host.touch(targets[block])\n            elif",
        "            if",
    ),
    "a shared block is swapped in with one reference": (
        BLOCKS,
        "        for block in places:\n            self.pool.touch",
        "        for block in set(places):\n            self.pool.touch",
    ),
    "blocks of a swapped-out request stay on the host": (
        BLOCKS,
        "            for table in left:\n                host.free_table(table)\n",
        "",
    ),
    "moves cost nothing": (SCHEDULER, "2 * moves < tokens", "0 < tokens"),
    "a failed swap-out counts as done": (
        SCHEDULER,
        "if any(map(lost.intersection, tables)):",
        "if False:",
    ),
    # beam search
    "a beam has one continuation only": (
        SCHEDULER,
        "beam = left.pop(continuation.beam, None)",
        "beam = left.pop(continuation.beam, parent)",
    ),
    "a dropped beam keeps its blocks": (
        SCHEDULER,
        "            self.blocks.free(parents[index])\n",
        "            pass\n",
    ),
    "beams do not wait for each other": (SCHEDULER, "if len(beams.candidates) < len(group.sequences):", "if False:"),
    "hypotheses are not normalized": (BEAM_SEARCH, "length**self._sampling.length_penalty", "1"),
    "only live beams have to agree": (
        BEAM_SEARCH,
        ", *(hypothesis.tokens for hypothesis in self.hypotheses[: self._sampling.n])",
        "",
    ),
    "any continuation may become a hypothesis": (
        BEAM_SEARCH,
        "elif rank < width and not closed:",
        "elif not closed:",
    ),
    # kinds of layers that do not keep all blocks
    "a full newest block is cached": (
        BLOCKS,
        "full if kind.caches_freed else kind.needed(full, size).stop",
        "full",
    ),
    "a full newest block is kept": (
        LAYOUT,
        "return range(min(num_blocks, 1))",
        "return range(num_blocks)",
    ),
    "the first edge is freed": (LAYOUT, "return range(min(num_blocks, 1))", "return range(0)"),
    "newest blocks of pending tokens are not counted": (
        LAYOUT,
        "(pending + 2 * block_size - 2) // block_size",
        "(2 * block_size - 2) // block_size",
    ),
    "a block leaves the window one token early": (LAYOUT, "+ 1 - self.window) //", "+ 2 - self.window) //"),
    "blocks are freed before their last reader has run": (
        BLOCKS,
        "table, needed = sequence.tables[place], kind.needed(full, size)",
        "table, needed = sequence.tables[place], kind.needed(full + 1, size)",
    ),
    "blocks outside of the window are kept": (
        BLOCKS,
        "chain(kind.needed(first, size), range(first, full)):\n                if index not in needed and table",
        "chain(kind.needed(first, size), range(first, full)):\n                if False and table",
    ),
    "blocks that are never needed are kept": (
        BLOCKS,
        "for index in chain(kind.needed(first, size), range(first, full)):",
        "for index in kind.needed(first, size):",
    ),
    "a freed block stays in its table": (BLOCKS, "                    table[index] = NULL\n", ""),
    "a hit of the first kind is a hit of all": (
        BLOCKS,
        "                if self.locate(BlockKey(entries[index], place)) is None:\n",
        "                if False:\n",
    ),
    "a hit holds blocks that are not needed": (
        BLOCKS,
        "self.locate(BlockKey(entries[at], place)) if at in needed else None",
        "self.locate(BlockKey(entries[at], place))",
    ),
    "a partial hit needs its block in the first kind only": (
        BLOCKS,
        "if len(partial) == len(self.layout.kinds):",
        "partial += partial[:1] * (len(self.layout.kinds) - len(partial))\n                if True:",
    ),
    "a prefix is shorter in the kinds that keep all blocks": (
        BLOCKS,
        "            del tables[place][count:]\n",
        "            pass\n",
    ),
    "a block of another kind is found": (
        BLOCKS,
        "block = self.pool.find(*key)\n        if block is not None:\n            return Location(block, False)",
        "block = self.pool.find(key.entry)\n        if block is not None:\n            return Location(block, False)",
    ),
    "a block goes to the host as one of the first kind": (
        LEDGER,
        "allocated = host.allocate(1, kind, after=after)",
        "allocated = host.allocate(1)",
    ),
    "only the first kind is offloaded": (
        BLOCKS,
        "if self.host and self.host.caching:",
        "if self.host and self.host.caching and self.pool.kind_of(block) == 0:",
    ),
    "blocks that will be needed in a window are not counted": (
        BLOCKS,
        "            total += kind.pages * max(0, needed - held)\n",
        "            total += kind.pages * max(0, needed - held) * kind.keeps_all\n",
    ),
    "blocks in a window are not counted for a swap-in": (
        BLOCKS,
        "max(len(held) + copied, self.layout.blocks_of_kind(kind, *sizes))",
        "len(held)",
    ),
    "a window needs no room for pending tokens": (
        LAYOUT,
        "(self.window + pending - 4) // block_size + 3",
        "(self.window - 4) // block_size + 3",
    ),
    "swap-in moves NULL": (BLOCKS, "targets.get(block, NULL) for", "targets.get(block, 0) for"),
    # log probabilities of prompts, and digests
    "scores outlive their block": (CONTENT, "        self.scores.pop(block, None)\n", ""),
    "the first token of a block has the scores of the next one": (
        SCHEDULER,
        "return max(0, index * block_size - 1)",
        "return index * block_size",
    ),
    "scores are taken twice": (SCHEDULER, "+= values[known:]", "+= values"),
    "scores without enough top tokens are taken": (CONTENT, "and top <= self._packed[name].num_top", ""),
    "scores without fingerprints are taken": (
        CONTENT,
        "name in self._packed and top <=",
        "name not in self._packed or top <=",
    ),
    "top tokens are lost when scores are merged": (
        CONTENT,
        "max(packed, key=lambda values: values.num_top)",
        "packed[0]",
    ),
    "equally likely tokens are in another order": (
        TOKEN_OUTPUTS,
        "sorted(value, key=lambda entry: (entry.rank, entry.token))[:num_top]",
        "list(value)[:num_top]",
    ),
    "a position whose scores are needed is a cache hit": (
        GROUP,
        "return self.num_scored + 1 if",
        "return self.num_scored + 2 if",
    ),
    "a prompt is returned twice": (SCHEDULER, "            group.scores_prompt = False\n", ""),
    "fingerprints after the end of an output are returned": (
        SCHEDULER,
        "by_seq[index][:count]",
        "by_seq[index]",
    ),
    # states of recurrent layers
    "samples write to the same state": (
        BLOCKS,
        "length > 0 and pool.is_shared(self.states.of(sequence))",
        "False",
    ),
    "copies of states are not counted": (BLOCKS, "(shares_state + num_states + (not", "(num_states + (not"),
    "states of draft tokens are not counted": (BLOCKS, "shares_state + num_states + (not", "shares_state + (not"),
    "first states are not counted": (BLOCKS, " + (not length and more > 0))", ")"),
    "only one state of a request is counted": (LAYOUT, "            return len(blocks)\n", "            return 1\n"),
    "a hit ends where no state was kept": (
        LAYOUT,
        "return range(max(0, num_blocks - 1), num_blocks)",
        "return range(0)",
    ),
    "a cached state is overwritten": (
        STATES,
        "                self._blocks.forget(BlockKey(entry, self.kind), on_host=False)\n",
        "                pass\n",
    ),
    "a kept state is overwritten": (STATES, "                self.copy(sequence, entry)\n", "                pass\n"),
    "states are copied without room for them": (
        STATES,
        "            if self.num_affordable:\n",
        "            if True:\n",
    ),
    "a copy of a state is copied in the same step": (
        STATES,
        " or self._blocks.ledger.copies_to(sequence.key, block):",
        ":",
    ),
    "a sequence keeps all states of its output": (
        STATES,
        "            self._blocks.forget(BlockKey(latest, self.kind))\n",
        "            pass\n",
    ),
    "a sequence forgets the state of its prompt": (STATES, "if before > sequence.num_prompt:", "if True:"),
    "earlier states of a prompt stay as long as the last one": (
        STATES,
        "            self._pool.evict_first(BlockKey(latest, self.kind))\n",
        "            pass\n",
    ),
    "the last state of a prompt is evicted first": (STATES, "elif position <= sequence.num_prompt:", "else:"),
    "a state is cached although its copy failed": (LEDGER, "if done and copy.entry:", "if copy.entry:"),
    "a kept state is not cached": (LEDGER, "if done and copy.entry:", "if False:"),
    "a chunk ends past the last full block": (
        STATES,
        "return end - start if start < end else length",
        "return length",
    ),
    "a state from the host is found where it is overwritten": (
        BLOCKS,
        "indexed = kind != self.layout.state  # a",
        "indexed = True  # a",
    ),
    "a swapped-in state is found where it is overwritten": (
        BLOCKS,
        "indexed = kind != state  # a",
        "indexed = True  # a",
    ),
    "a swapped-in state is one that a planned sequence overwrites": (
        BLOCKS,
        " and (host.kind_of(block) != state or self.pool.is_cached(cached)):",
        ":",
    ),
    "a sequence continues from the state after a rejected token": (STATES, "blocks[num_accepted]", "blocks[-1]"),
    "a sequence continues from the state before its accepted tokens": (STATES, "blocks[num_accepted]", "blocks[0]"),
    "the state before accepted tokens is that of another position": (
        STATES,
        "index = num_accepted - (sequence.computed - position)",
        "index = num_accepted - 1",
    ),
    "states of draft tokens are never freed": (
        STATES,
        "        self._pool.free_table(self._drafts)\n",
        "        pass\n",
    ),
    "the state before accepted tokens is never freed": (
        STATES,
        "            self._pool.free(blocks[0])\n",
        "            pass\n",
    ),
    "states of a failed request are found": (
        BLOCKS,
        "            for entry in sequence.chain.entries:\n                self.forget(",
        "            for entry in ():\n                self.forget(",
    ),
    "a session does not pin a state that was left behind": (
        BLOCKS,
        "[-1] = NULL if state is None else state",
        "[-1] = NULL",
    ),
    "a block without pages has the number of another": (
        PAGES,
        "            self._numbers.append(block)\n",
        "            self._numbers += (block, block)\n",
    ),
    "the page after a state stays claimed": (PAGES, "        self._free.end_growth(taken[-1])\n", ""),
    "blocks of a kind are not counted": (PAGES, "        self._num_blocks[kind] += count\n", ""),
    # sessions
    "a session pins no blocks": (SCHEDULER, "if session is not None and", "if False and"),
    "a session keeps its former blocks pinned": (
        BLOCKS,
        "        self.drop(name)\n        self._pinned",
        "        self._pinned",
    ),
    "pins have no limit": (BLOCKS, "while self.num_pages > self._limit:", "while False:"),
    "pins are never dropped for requests": (BLOCKS, "        if not self._pinned:\n", "        if True:\n"),
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
    "a full newest block is cached",
    "a full newest block is kept",
    "newest blocks of pending tokens are not counted",
    "top tokens are lost when scores are merged",
    "the most recently used cached block is evicted",
    "a table is freed head first",
    "double free is accepted",
    "only the first kind is offloaded",
    "blocks that will be needed in a window are not counted",
    "blocks in a window are not counted for a swap-in",
    "swap-in moves NULL",
    "evicted blocks are not offloaded",
    "a finished move in is not indexed",
    "a partial hit from the host is indexed",
    "a failed swap-out counts as done",
    "a partial hit needs its block in the first kind only",
    "a failed move out stays indexed",
    "a block from disk stays referenced",
    "a block from disk is added twice",
    "content that the host has is spilled again",
    "swap-out ignores the host's room",
    "a block is spilled again and again",
    "a failed move in is indexed",
    "sources of copies count as shared",
    "children are searched on one side only",
    "a failed allocation evicts",
    "entries are kept for ever",
    "the last block of invalidated content is found",
    "the last block of a sequence is not cached",
    "a last block that others may write to is cached",
    "a last block in use is taken over",
    "a last block with other tokens is taken over",
    "a block that is taken over is still found",
    "a last block without its content is cached",
    "the last block of a beam is cached",
    "the copy of a step that fails is cached",
    "cached blocks are evicted for runs without limit",
    "the same last block is cached twice",
    "blocks that are not full are written to stores",
    "an extent is not continued",
    "a claimed run is taken",
    "the page after an ended sequence stays claimed",
    "invalidated content is still found",
    "invalidated content is still found on the host",
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
    "first states are not counted",
    "a sequence keeps all states of its output",
    "a sequence forgets the state of its prompt",
    "earlier states of a prompt stay as long as the last one",
    "the last state of a prompt is evicted first",
    "a state is cached although its copy failed",
    "a kept state is not cached",
    "a chunk ends past the last full block",
    "a swapped-in state is found where it is overwritten",
    "a swapped-in state is one that a planned sequence overwrites",
    "the state before accepted tokens is that of another position",
    "states of a failed request are found",
    "a session does not pin a state that was left behind",
    "the page after a state stays claimed",
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
    "equally likely tokens are in another order": 25,
    "blocks are cached after the end": 11,
    "a preempted request waits for its tenant": 12,
    "a partial hit is copied without room for it": 4,
    "tokens after the end are returned": 3,
    "a block leaves the window one token early": 5,
    "only live beams have to agree": 6,
    "a shared block is swapped in with one reference": 5,
    "the first token of a block has the scores of the next one": 5,
    "all samples have the same seed": 3,
    "blocks of a swapped-out request stay on the host": 5,
    "a tenant without waiting requests is dropped": 3,
    "beams do not wait for each other": 3,
    "a beam has one continuation only": 3,
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
    "a shared block is swapped out twice": 7,
    "scores without fingerprints are taken": 2,
    "copies of states are not counted": 7,
    "only one state of a request is counted": 9,
    "a cached state is overwritten": 3,
    "states are copied without room for them": 3,
    "a state from the host is found where it is overwritten": 17,
    "adapters share prefixes": 0,
    "pins have no limit": 0,
}

REIMPORTED = ("paged_backend", "tests.support.scheduler_stress", "tests.support.shadow")
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
        load = importlib.import_module("tests.support.scheduler_stress")
        for seed in seeds:
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
            try:
                for conditions in (load.RECURRENT, load.CONDITIONS, load.DROPPING, load.PIPELINED):
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
