"""A stand-in for the model: each slot holds a digest of all tokens up to it, so that a wrong block is detected.

The next token is drawn from the digest that was read through the block table. A sequence that reads the slot of another
one, a stale one or an unwritten one gets other tokens, or fails at once. A state of recurrent layers is the digest of
all tokens before it, in every slot of its pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, ClassVar

from paged_backend.api.block_layout import EdgeKind, LayerKind, WindowKind
from paged_backend.api.request import GenerateRequest, Origin
from paged_backend.api.token_outputs import Fingerprint, Logprobs, TokenLogprob
from paged_backend.kv import content as contents
from paged_backend.kv.content import BlockKey, Key
from paged_backend.kv.ledger import page_pairs
from paged_backend.kv.pages import NULL
from paged_backend.kv.sequence import Sequence
from paged_backend.scheduling.beam_search import BeamSearch, Candidate
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Plan, StepResult, accept_draft_tokens
from paged_backend.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class FirstOfStride(LayerKind):
    """Layers whose queries see their own block, and of the earlier ones those that begin at multiples of `stride`
    tokens."""

    keeps_all: ClassVar[bool] = False

    stride: int = 64

    def needed(self, num_blocks: int, block_size: int) -> range:
        return range(0, num_blocks, self.stride // block_size)

    def max_blocks(self, num_blocks: int, pending: int, block_size: int) -> int:
        kept = -(-num_blocks // (self.stride // block_size))
        return min(num_blocks, kept + pending // block_size + 2)


def is_seen(kind: LayerKind, position: int, query: int, block_size: int) -> bool:
    """Return whether a query at a position reads the keys and values of another one, which is not after it."""
    if isinstance(kind, FirstOfStride):
        block = position // block_size
        return block == query // block_size or block * block_size % kind.stride == 0
    if isinstance(kind, EdgeKind):
        return position < block_size or position // block_size == query // block_size
    return not isinstance(kind, WindowKind) or position > query - kind.window


@contextmanager
def truncated_keys(bits: int) -> Iterator[None]:
    """Make keys collide: only `bits` bits of a block's key, at most 8, differ, and all origins have the same key."""
    root, chain = contents.root_key, contents.chain_key
    contents.root_key = lambda origin: bytes(32)
    contents.chain_key = lambda parent, tokens: bytes([chain(parent, tokens)[0] >> 8 - bits]).rjust(32, b"\0")
    try:
        yield
    finally:
        contents.root_key, contents.chain_key = root, chain


def finish(sched, store, *requests):
    """Run requests to their end, and return their tokens by (key, index)."""
    for one in requests:
        sched.add(one)
    outputs = {}
    while sched.has_work:
        plan = sched.schedule()
        sched.check()
        for delta in sched.commit(plan, store.run(plan)):
            outputs.setdefault((delta.key, delta.sample), []).extend(delta.token_ids)
        sched.check()
    assert sched.blocks.num_used == 0
    return outputs


def extend(digest: bytes, token: int) -> bytes:
    return blake2b(digest + token.to_bytes(4, "little"), digest_size=8).digest()


def draw(digest: bytes, seed: int, vocab: int) -> int:
    return blake2b(digest + seed.to_bytes(8, "little"), digest_size=2).digest()[0] % vocab


def candidates(digest: bytes, vocab: int) -> list[Candidate]:
    """Return the candidates of a live beam, most likely first."""
    chances = [(-float(1 + extend(digest, token)[0]) / 64, token) for token in range(vocab)]
    return [Candidate(token, chance) for chance, token in sorted(chances, reverse=True)]


def fingerprint(digest: bytes) -> Fingerprint:
    """Return the fingerprint of the logits after the tokens of a digest."""
    return blake2b(digest, digest_size=16).digest()


def score(digest: bytes, token: int, num_top: int, vocab: int) -> Logprobs:
    """Return the log probabilities of a token and of the most likely ones. Many are equal."""
    chances = [-float(1 + extend(digest, one)[0] % 8) for one in range(vocab)]
    entries = [TokenLogprob(one, chance, 1 + sum(other > chance for other in chances))
               for one, chance in enumerate(chances)]  # fmt: skip
    top = sorted(entries, key=lambda entry: (entry.rank, entry.token))[:num_top]
    return entries[token], *(entry for entry in top if entry.token != token)


def expected_scores(request: GenerateRequest, vocab: int) -> dict[str, tuple[Any, ...]]:
    """Return the values of a prompt's tokens, by optional output."""
    digest, scores, fingerprints = start(request), [], []
    for token, following in pairwise(request.prompt_token_ids):
        digest = extend(digest, token)
        scores.append(score(digest, following, request.sampling.prompt_logprobs or 0, vocab))
        fingerprints.append(fingerprint(digest))
    found = {"logprobs": tuple(scores), "fingerprints": tuple(fingerprints)}
    return {name: found[name] for name in request.prompt_outputs}


def expected_fingerprints(request: GenerateRequest, tokens: Iterable[int]) -> list[Fingerprint]:
    """Return the fingerprints of the logits from which an output was chosen."""
    digest, found = start(request), []
    for token in request.prompt_token_ids:
        digest = extend(digest, token)
    for token in tokens:
        found.append(fingerprint(digest))
        digest = extend(digest, token)
    return found


def start(request: GenerateRequest) -> bytes:
    """Return what the keys and values of a request's first token depend on, apart from that token."""
    return repr((request.sampling.cache_salt, request.adapter and request.adapter.digest)).encode()


def expected_tokens(request: GenerateRequest, index: int, vocab: int) -> list[int]:
    """Return the output of a sample, which does not depend on other requests."""
    digest = start(request)
    for token in request.prompt_token_ids:
        digest = extend(digest, token)
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens:
        tokens.append(draw(digest, request.seed + index, vocab))
        if tokens[-1] in request.stop_ids:
            break
        digest = extend(digest, tokens[-1])
    return tokens


def expected_beams(request: GenerateRequest, vocab: int) -> list[tuple[int, ...]]:
    """Return the outputs of a beam search."""
    digest = start(request)
    for token in request.prompt_token_ids:
        digest = extend(digest, token)
    search, live = BeamSearch(request.sampling, request.stop_ids), [((), digest)]
    while live:
        steps = search.advance([output for output, _ in live], [candidates(one, vocab) for _, one in live])
        live = [((*live[beam][0], token), extend(live[beam][1], token)) for beam, token in steps]
    return [one.tokens for one in search.best]


class ShadowStore:
    """The slots of the pools, and a forward pass over them."""

    def __init__(self, scheduler: Scheduler, vocab: int):
        self._blocks = scheduler.blocks
        self._vocab = vocab
        self._last: list[int] = []  # the rows that the step before sampled
        self.slots: list[bytes | None] = [None] * (scheduler.blocks.num_pages * scheduler.blocks.block_size)
        host = scheduler.blocks.host
        self.host: list[bytes | None] = [None] * (host.num_pages * scheduler.blocks.block_size if host else 0)
        self.key_collisions = 0  # files with the requested key and other content
        self.num_state_copies = 0
        self.num_states_moved_in = 0
        # By key and kind of layer: origin and tokens, and the slots.
        self.disk: dict[tuple[Key, int], tuple[tuple[Origin, list[int]], list[bytes | None]]] = {}

    def run(self, plan: Plan) -> StepResult:
        self._copy(plan)
        self._check_states(plan)
        rows: list[int] = []
        tokens: list[list[int]] = []
        found: dict[int, list[Candidate]] = {}
        scores: dict[str, dict[int, list[Any]]] = {"logprobs": {}, "fingerprints": {}}
        fingerprints: dict[int, list[Fingerprint]] = {}
        for index, chunk in enumerate(plan.chunks):
            digest, checked = self._read(chunk.sequence, chunk.start, chunk.start), []
            states = dict(enumerate(chunk.draft_states, chunk.first_sampled))  # of the positions of draft tokens
            sampling, before = chunk.sequence.request.sampling, []
            for position in range(chunk.start, chunk.start + chunk.length):
                if position >= chunk.first_sampled:
                    checked.append(draw(digest, chunk.sequence.seed, self._vocab))
                    before.append(fingerprint(digest))
                digest = extend(digest, self._token(chunk.sequence, position))
                if position in chunk.scored:
                    following = chunk.sequence.tokens[position + 1]
                    scores["logprobs"].setdefault(index, []).append(
                        score(digest, following, sampling.prompt_logprobs or 0, self._vocab)
                    )
                    if sampling.logits_digest:
                        scores["fingerprints"].setdefault(index, []).append(fingerprint(digest))
                for slot in self._slots(chunk.sequence, position):
                    self.slots[slot] = digest
                if self._blocks.states:
                    self._write_state(states.get(position, self._blocks.states.of(chunk.sequence)), digest)
            for sequence in chunk.sampled_sequences:
                if sequence.request.sampling.beam_width > 1:
                    values = {"fingerprints": fingerprint(digest)} if sampling.logits_digest else {}
                    found[len(tokens)] = [one._replace(values=values) for one in candidates(digest, self._vocab)]
                elif sampling.logits_digest:
                    fingerprints[len(tokens)] = [*before, fingerprint(digest)]
                sampled = [*checked, draw(digest, sequence.seed, self._vocab)]
                rows += sampled
                tokens.append(accept_draft_tokens(sampled, chunk.draft_tokens))
        # After all rows: none may read what another row of the same step has overwritten.
        for chunk in plan.chunks:
            self._read(chunk.sequence, chunk.start + chunk.length, chunk.start)
        self._last = rows
        return StepResult(
            tokens,
            candidates=found,
            prompt_values=scores,
            values={"fingerprints": fingerprints},
        )

    def _check_states(self, plan: Plan) -> None:
        """Assert that each chunk continues from the state of its own tokens, and writes to blocks of its own."""
        states = self._blocks.states
        if states is None:
            return
        written = [block for chunk in plan.chunks for block in (states.of(chunk.sequence), *chunk.draft_states)]
        assert len(set(written)) == len(written), "two sequences write to one state"
        for block in written:
            assert self._blocks.pool.kind_of(block) == states.kind
            assert self._blocks.pool.entry(block) is None, "a state in the prefix cache is overwritten"
        for chunk in plan.chunks:
            assert len(chunk.draft_states) == len(chunk.draft_tokens)
            if chunk.start:
                digest, block = start(chunk.sequence.request), states.of(chunk.sequence)
                for position in range(chunk.start):
                    digest = extend(digest, self._token(chunk.sequence, position))
                for page in self._blocks.pool.pages_of(block):
                    assert set(self.slots[self._span(page)]) == {digest}, (chunk.sequence.key, chunk.sequence.index)
        kind_of = self._blocks.pool.kind_of
        self.num_state_copies += sum(kind_of(copy.target) == states.kind for copy in plan.transfers.copies)
        self.num_states_moved_in += sum(kind_of(move.target) == states.kind for move in plan.transfers.moves_in)

    def _write_state(self, block: int, digest: bytes) -> None:
        for page in self._blocks.pool.pages_of(block):
            self.slots[self._span(page)] = [digest] * self._blocks.block_size

    def spill(self, most: int) -> int:
        """Spill cached blocks to the disk, by way of the host, as an idle engine does. Return how many."""
        blocks = self._blocks
        transfers = blocks.spill(lambda key: (key.entry.key, key.kind) not in self.disk, most)
        self._copy(Plan(transfers=transfers))
        for move in transfers.moves_out:
            place = blocks.host.kind_of(move.target)
            if move.entry and (move.entry.key, place) not in self.disk:  # two blocks may have the same key
                content = [slot for page in blocks.host.pages_of(move.target) for slot in self.host[self._span(page)]]
                self.disk[move.entry.key, place] = move.entry.prefix, content
        blocks.ledger.finish(transfers)
        return len(transfers.moves_out)

    def fetch(self, request: GenerateRequest) -> int:
        """Load the blocks of a request's prefix that only the disk has to the host, as the engine does before it adds
        the request. Return how many."""
        blocks = self._blocks
        assert blocks.host
        sequence, found = Group(request).leader, 0
        for index in range((len(request.prompt_token_ids) - 1) // blocks.block_size):
            entry = blocks.entry(sequence, index)
            for kind in range(len(blocks.layout.kinds)):
                key = BlockKey(entry, kind)
                prefix, content = self.disk.get((entry.key, kind), (None, []))
                if prefix != entry.prefix:
                    self.key_collisions += prefix is not None
                elif blocks.pool.find(*key) is None and (block := blocks.add_to_host(key)) is not None:
                    for at, page in enumerate(blocks.host.pages_of(block)):
                        self.host[self._span(page)] = content[self._span(at)]
                    found += 1
        return found

    def _token(self, sequence: Sequence, position: int) -> int:
        """Return a token; for a placeholder, the token that the step in flight sampled."""
        token = sequence.tokens[position]
        if token < 0:
            return self._last[-1 - token]
        return token

    def _copy(self, plan: Plan) -> None:
        for moves, source, target in (
            (plan.transfers.moves_out, self.slots, self.host),
            (plan.transfers.moves_in, self.host, self.slots),
            (plan.transfers.copies, self.slots, self.slots),
        ):
            pages = page_pairs(moves)
            targets = [page for _, page in pages]
            assert len(set(targets)) == len(targets)
            assert source is not target or not set(targets) & {page for page, _ in pages}
            for page, to in pages:
                target[self._span(to)] = source[self._span(page)]

    def _span(self, page: int) -> slice:
        size = self._blocks.block_size
        return slice(page * size, (page + 1) * size)

    def _slots(self, sequence: Sequence, position: int, kinds: Iterable[int] | None = None) -> list[int]:
        """Return the slots of a token in the pages of its blocks, of all kinds of layers by default."""
        size, slots = self._blocks.block_size, []
        for kind in range(len(self._blocks.layout.token_kinds)) if kinds is None else kinds:
            block = sequence.tables[kind][position // size]
            assert block != NULL, f"position {position}: its block of kind {kind} is gone"
            assert self._blocks.pool.kind_of(block) == kind, f"position {position}: a block of another kind"
            slots += [page * size + position % size for page in self._blocks.pool.pages_of(block)]
        return slots

    def _read(self, sequence: Sequence, length: int, query: int) -> bytes:
        """Return the digest of the first `length` tokens, and assert that the slots that the queries of a chunk from
        position `query` on can see hold it."""
        digest, kinds, size = start(sequence.request), self._blocks.layout.token_kinds, self._blocks.block_size
        for position in range(length):
            digest = extend(digest, self._token(sequence, position))
            seen = [at for at, kind in enumerate(kinds) if position >= query or is_seen(kind, position, query, size)]
            for slot in self._slots(sequence, position, seen):
                assert self.slots[slot] == digest, (sequence.key, sequence.index, position)
        return digest
