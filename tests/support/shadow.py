"""A stand-in for the model: each slot holds a digest of all tokens up to it, so that a wrong block is detected.

The next token is drawn from the digest that was read through the block table. A sequence that reads the slot of another
one, a stale one or an unwritten one gets other tokens, or fails at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise

from paged_backend.api.request import Fingerprint, GenerateRequest, Logprobs, Origin, TokenLogprob
from paged_backend.scheduling.beam_search import BeamSearch, Candidate
from paged_backend.scheduling.content import Chain, Key
from paged_backend.scheduling.host_offload import copied_pages
from paged_backend.scheduling.plan import Plan
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.sequence import Sequence
from paged_backend.scheduling.step_result import StepResult, accept_draft_tokens


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


def expected_scores(request: GenerateRequest, vocab: int) -> tuple[tuple[Logprobs, ...], tuple[Fingerprint, ...]]:
    """Return the log probabilities and the fingerprints of a prompt."""
    digest, scores, fingerprints = start(request), [], []
    for token, following in pairwise(request.prompt_token_ids):
        digest = extend(digest, token)
        scores.append(score(digest, following, request.sampling.prompt_logprobs or 0, vocab))
        fingerprints.append(fingerprint(digest))
    return tuple(scores), tuple(fingerprints) if request.sampling.logits_digest else ()


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
        self.slots: list[bytes | None] = [None] * (scheduler.blocks.num_blocks * scheduler.blocks.block_size)
        host = scheduler.blocks.host
        self.host: list[bytes | None] = [None] * (host.num_blocks * scheduler.blocks.block_size if host else 0)
        self.key_collisions = 0  # files with the requested key and other content
        self.disk: dict[
            Key, tuple[tuple[Origin, list[int]], list[bytes | None]]
        ] = {}  # by key: origin and tokens, and the slots

    def run(self, plan: Plan) -> StepResult:
        self._copy(plan)
        rows: list[int] = []
        tokens: list[list[int]] = []
        found: dict[int, list[Candidate]] = {}
        scores: dict[int, list[Logprobs]] = {}
        prompt_fingerprints: dict[int, list[Fingerprint]] = {}
        fingerprints: dict[int, list[Fingerprint]] = {}
        for index, chunk in enumerate(plan.chunks):
            digest, checked = self._read(chunk.sequence, chunk.start, chunk.start), []
            sampling, before = chunk.sequence.request.sampling, []
            for position in range(chunk.start, chunk.start + chunk.length):
                if position >= chunk.first_sampled:
                    checked.append(draw(digest, chunk.sequence.seed, self._vocab))
                    before.append(fingerprint(digest))
                digest = extend(digest, self._token(chunk.sequence, position))
                if position in chunk.scored:
                    following = chunk.sequence.tokens[position + 1]
                    scores.setdefault(index, []).append(
                        score(digest, following, sampling.prompt_logprobs or 0, self._vocab)
                    )
                    if sampling.logits_digest:
                        prompt_fingerprints.setdefault(index, []).append(fingerprint(digest))
                for slot in self._slots(chunk.sequence, position):
                    self.slots[slot] = digest
            for sequence in chunk.sampled_sequences:
                if sequence.request.sampling.beam_width > 1:
                    found[len(tokens)] = candidates(digest, self._vocab)
                if sampling.logits_digest:
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
            prompt_logprobs=scores,
            prompt_fingerprints=prompt_fingerprints,
            fingerprints=fingerprints,
        )

    def spill(self, most: int) -> int:
        """Spill cached blocks to the disk, by way of the host, as an idle engine does. Return how many."""
        plan = Plan((), moves_out=self._blocks.offload.spill(lambda entry: entry.key not in self.disk, most))
        self._copy(plan)
        for move in plan.moves_out:
            if move.entry and move.entry.key not in self.disk:  # two blocks of one plan may have the same key
                content = [slot for page in move.target_pages for slot in self.host[self._span(page)]]
                self.disk[move.entry.key] = move.entry.prefix, content
        self._blocks.offload.finish_moves_out(plan.moves_out)
        return len(plan.moves_out)

    def fetch(self, request: GenerateRequest) -> int:
        """Load the blocks of a request's prefix that only the disk has to the host, as the engine does before it adds
        the request. Return how many."""
        blocks = self._blocks
        assert blocks.host
        tokens, chain, found = request.prompt_token_ids, Chain(request.origin), 0
        for index in range((len(tokens) - 1) // blocks.block_size):
            entry = blocks.cache.entry(chain, tokens, index)
            if blocks.cache.find(entry) is None:
                prefix, content = self.disk.get(entry.key, (None, []))
                if prefix != entry.prefix:
                    self.key_collisions += prefix is not None
                    break
                trimmed = len(content) < blocks.layout.pages * blocks.block_size
                block = blocks.offload.add_host_block(entry, trimmed=trimmed)
                if block is None:
                    break
                for index, page in enumerate(blocks.host.pages_of(block)):
                    self.host[self._span(page)] = content[self._span(index)]
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
            (plan.moves_out, self.slots, self.host),
            (plan.moves_in, self.host, self.slots),
            (plan.copies, self.slots, self.slots),
        ):
            pages = [pair for move in moves for pair in copied_pages(move)]
            targets = [page for _, page in pages]
            assert len(set(targets)) == len(targets)
            assert source is not target or not set(targets) & {page for page, _ in pages}
            for page, to in pages:
                target[self._span(to)] = source[self._span(page)]

    def _span(self, page: int) -> slice:
        size = self._blocks.block_size
        return slice(page * size, (page + 1) * size)

    def _slots(self, sequence: Sequence, position: int) -> list[int]:
        """Return the slots of a token, in the base pages and then in the window pages of its block."""
        size = self._blocks.block_size
        pages = self._blocks.pool.pages_of(sequence.blocks[position // size])
        return [page * size + position % size for page in pages]

    def _read(self, sequence: Sequence, length: int, query: int) -> bytes:
        """Return the digest of the first `length` tokens, and assert that the slots that queries from position `query`
        on can see hold it."""
        digest, layout = start(sequence.request), self._blocks.layout
        for position in range(length):
            digest = extend(digest, self._token(sequence, position))
            slots = self._slots(sequence, position)
            if position <= query - layout.window or not layout.window_pages:
                slots = slots[: layout.base_pages]
            else:
                assert len(slots) == layout.pages, f"position {position}: its window pages are gone"
            for slot in slots:
                assert self.slots[slot] == digest, (sequence.key, sequence.index, position)
        return digest
