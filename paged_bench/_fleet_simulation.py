"""Simulates a fleet of replicas in simulated time, each with the real scheduler and block manager but without a model.

A step takes the time that a linear model of its work gives. As long as no prompt has to be computed, no request arrives
and no reply ends, one step decodes several tokens of each sequence, which the scheduler takes for accepted draft
tokens. It takes the time of as many steps of one token. What is simplified:
- The router, the network, the tokenizer and the scheduler itself take no time.
- The router knows at once what a replica has cached.
- All replies have the length that was drawn for them; steps do not overlap with the work of the CPU.

Each conversation has one of several system prompts, the first of which are more popular (Zipf), and 1 to MAX_TURNS
turns. The prompt of a turn is the whole text so far and a new message; the lengths of messages and replies are
log-normal with ShareGPT's means. The user thinks between two turns. Token ids only have to tell texts apart: all tokens
of system prompt s are s, and all others of conversation c are the number of system prompts + c.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import statistics
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.content import CacheEvent, Entry, Listener
from paged_backend.kv.sequence import Sequence
from paged_backend.scheduling.plan import Plan, StepResult
from paged_backend.scheduling.scheduler import Scheduler
from paged_bench._engine import DATASETS, lengths

BLOCK_SIZE = 16
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 2048
WARM_UP = 0.3  # share of the conversations that start before anything is measured
RING_POINTS = 128  # points of each replica on the ring; the parts of replicas differ by about 1 / sqrt(RING_POINTS)
LOAD_FACTOR = 1.25  # open requests of a replica, as a multiple of the mean, above which it is passed over ...
LOAD_SLACK = 8  # ... if it has more than this above the mean: small differences cost less than an empty cache
HELD_SHARE = 0.5  # share of a prompt that a replica must have cached to be preferred to the ring's choice
POLICIES = ("round-robin", "least-loaded", "hashing", "cache-aware")
MAX_TURNS = 8
CONTINUES = 2 / 3  # probability that a conversation has another turn
SYSTEM_TOKENS = (256, 1024)  # shortest and longest system prompt
MAX_CONTEXT = 8192  # tokens; a conversation ends before the turn that would exceed it
THINK_SECONDS = 5.0  # mean time from the end of a reply to the next message, exponentially distributed
PROMPTS_PER_REPLICA = 2
MAX_PROMPTS = 128
_NUM_LENGTHS = 4000  # lengths of messages and replies to draw from


# --- conversations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: int  # tokens of the whole prompt
    reply: int
    think: float  # seconds after the reply until the next turn


@dataclass(frozen=True, slots=True)
class Conversation:
    number: int
    start: float  # seconds
    system: int  # number of the system prompt
    system_tokens: int
    token: int  # id of all tokens after the system prompt
    turns: tuple[Turn, ...]

    def prompt(self, turn: int) -> tuple[int, ...]:
        """Return the token ids of a turn's prompt."""
        own = self.turns[turn].prompt - self.system_tokens
        return (self.system,) * self.system_tokens + (self.token,) * own


class Workload:
    """An endless sequence of conversations that start at random times (a Poisson process).

    Args:
        num_prompts: number of system prompts.
        rate: conversations per second.
        seed: the same seed gives the same conversations, whose times are in proportion to the rate.
    """

    def __init__(self, num_prompts: int, rate: float, seed: int) -> None:
        rng = random.Random(seed)
        self.num_prompts = num_prompts
        self.rate = rate
        self._seed = seed
        self._systems = [rng.randint(*SYSTEM_TOKENS) for _ in range(num_prompts)]
        self._weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(num_prompts)))
        self._messages, self._replies = (lengths(mean, _NUM_LENGTHS, rng) for mean in DATASETS["ShareGPT"])

    def __iter__(self) -> Iterator[Conversation]:
        rng = random.Random(f"{self._seed} conversations")
        start = 0.0
        for number in itertools.count():
            start += rng.expovariate(self.rate)
            system = rng.choices(range(self.num_prompts), cum_weights=self._weights)[0]
            length = self._systems[system]
            yield Conversation(number, start, system, length, self.num_prompts + number, self._turns(length, rng))

    def _turns(self, text: int, rng: random.Random) -> tuple[Turn, ...]:
        """Draw the turns of a conversation. text: tokens of its system prompt."""
        turns: list[Turn] = []
        while not turns or (len(turns) < MAX_TURNS and rng.random() < CONTINUES):
            prompt, reply = text + rng.choice(self._messages), rng.choice(self._replies)
            if prompt + reply > MAX_CONTEXT:
                break
            turns.append(Turn(prompt, reply, rng.expovariate(1 / THINK_SECONDS)))
            text = prompt + reply
        return tuple(turns)


@dataclass(frozen=True)
class MeanLengths:
    """Means over many conversations."""

    turns: float  # per conversation
    prompt: float  # tokens per turn
    reply: float


def mean_lengths(num_prompts: int, seed: int) -> MeanLengths:
    """Return the means of the first conversations of a workload."""
    some = list(itertools.islice(Workload(num_prompts, 1.0, seed), 5000))
    turns = [turn for conversation in some for turn in conversation.turns]
    return MeanLengths(
        turns=len(turns) / len(some),
        prompt=statistics.mean(turn.prompt for turn in turns),
        reply=statistics.mean(turn.reply for turn in turns),
    )


def num_prompts(replicas: int) -> int:
    """Return the number of system prompts of a fleet: larger fleets serve more applications."""
    return min(MAX_PROMPTS, PROMPTS_PER_REPLICA * replicas)


# --- routing ----------------------------------------------------------------------------------------------------------


class Policy(Protocol):
    """Chooses the replica of each request."""

    def choose(self, conversation: Conversation, turn: int) -> int:
        """Return the replica of a turn, and count the request as open there."""
        ...

    def close(self, replica: int) -> None:
        """Count the end of a request."""
        ...


class CachedBlocks:
    """Knows how many blocks of each text every replica has cached. It listens to the prefix caches of the replicas.

    The last token of a block tells which system prompt or conversation it belongs to. The cached blocks of a text are
    its first ones, as later blocks are evicted earlier. Their number is therefore enough.
    """

    def __init__(self, num_replicas: int, block_size: int) -> None:
        self._num_replicas = num_replicas
        self._block_size = block_size
        self._held: defaultdict[int, dict[int, int]] = defaultdict(dict)  # token -> replica -> blocks

    def listener(self, replica: int) -> _Listener:
        """Return the listener for the pool of one replica."""
        return _Listener(self._held, replica)

    def shares(self, conversation: Conversation, turn: int) -> list[float]:
        """Return the share of a turn's prompt that each replica has cached."""
        size, prompt = self._block_size, conversation.turns[turn].prompt
        shares = [0.0] * self._num_replicas
        own = self._held.get(conversation.token, {})
        for replica, blocks in self._held.get(conversation.system, {}).items():
            if blocks == conversation.system_tokens // size:
                blocks += own.get(replica, 0)
            shares[replica] = min(blocks * size / prompt, 1.0)
        return shares


class _Listener:
    def __init__(self, held: defaultdict[int, dict[int, int]], replica: int) -> None:
        self._held = held
        self._replica = replica

    def __call__(self, event: CacheEvent) -> None:
        if len(event.entry.tokens) == BLOCK_SIZE:  # as engines publish them
            (self.stored if event.stored else self.removed)(event.entry)

    def stored(self, entry: Entry) -> None:
        blocks = self._held[entry.tokens[-1]]
        blocks[self._replica] = blocks.get(self._replica, 0) + 1

    def removed(self, entry: Entry) -> None:
        blocks = self._held[entry.tokens[-1]]
        blocks[self._replica] -= 1
        if not blocks[self._replica]:
            del blocks[self._replica]
            if not blocks:
                del self._held[entry.tokens[-1]]


class LeastLoaded:
    """Chooses the replica with the fewest open requests; among equals, each in turn."""

    def __init__(self, num_replicas: int) -> None:
        self._open = [0] * num_replicas
        self._turn = itertools.count()

    def choose(self, conversation: Conversation, turn: int) -> int:
        count = len(self._open)
        first = next(self._turn) % count
        offset = min(range(count), key=lambda offset: self._open[(first + offset) % count])
        replica = (first + offset) % count
        self._open[replica] += 1
        return replica

    def close(self, replica: int) -> None:
        self._open[replica] -= 1


class RoundRobin:
    """Chooses each replica in turn."""

    def __init__(self, num_replicas: int) -> None:
        self._turns = itertools.cycle(range(num_replicas))

    def choose(self, conversation: Conversation, turn: int) -> int:
        return next(self._turns)

    def close(self, replica: int) -> None:
        pass


class Hashing:
    """Chooses the replica that has probably cached the beginning of the conversation, and is not overloaded.

    The first messages are hashed to a ring of replicas (consistent hashing), so that all turns go to the same one. A
    replica that has more than its share of the open requests is passed over (Mirrokni, Thorup and Zadimoghaddam:
    Consistent Hashing with Bounded Loads, 2016).

    Args:
        cached: what each replica has cached: after the first turn, a replica that has cached most of the prompt is
            preferred. None: unknown.
    """

    def __init__(self, num_replicas: int, cached: CachedBlocks | None) -> None:
        points = itertools.product(range(num_replicas), range(RING_POINTS))
        self._points = sorted((_hash(f"replica-{replica} {index}"), replica) for replica, index in points)
        self._open = [0] * num_replicas
        self._cached = cached

    def choose(self, conversation: Conversation, turn: int) -> int:
        count = len(self._open)
        mean = (sum(self._open) + 1) / count
        capacity = math.ceil(max(LOAD_FACTOR * mean, mean + LOAD_SLACK))
        shares = self._cached.shares(conversation, turn) if self._cached and turn > 0 else [0.0] * count

        def badness(replica: int) -> tuple[bool, float]:
            return self._open[replica] >= capacity, -shares[replica] if shares[replica] >= HELD_SHARE else 0.0

        messages = [
            {"role": "system", "content": f"system prompt {conversation.system}"},
            {"role": "user", "content": f"first message of conversation {conversation.number}"},
        ]
        replica = min(self._order(json.dumps(messages)), key=badness)
        self._open[replica] += 1
        return replica

    def close(self, replica: int) -> None:
        self._open[replica] -= 1

    def _order(self, key: str) -> list[int]:
        """Return all replicas in the order in which they follow the key on the ring."""
        place = bisect_left(self._points, (_hash(key), -1))
        return list(dict.fromkeys(replica for _, replica in self._points[place:] + self._points[:place]))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def make_policy(name: str, num_replicas: int, cached: CachedBlocks) -> Policy:
    """Return one of POLICIES."""
    if name == "round-robin":
        return RoundRobin(num_replicas)
    if name == "least-loaded":
        return LeastLoaded(num_replicas)
    return Hashing(num_replicas, cached if name == "cache-aware" else None)


# --- replicas ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCosts:
    """The time of a step in seconds, as a linear function of its work."""

    base: float
    prefill_token: float
    sequence: float
    context_token: float  # a token whose keys and values are read

    def decode(self, sequences: int, context: int, tokens: int = 1) -> float:
        """Return the time of `tokens` steps that decode one token of each sequence. context: tokens of all sequences in
        the first step."""
        added = sequences * tokens * (tokens - 1) // 2  # each step reads the tokens of the steps before
        return tokens * (self.base + self.sequence * sequences) + self.context_token * (tokens * context + added)

    def capacity(self, mean: MeanLengths, num_blocks: int) -> float:
        """Return the requests per second that a replica with a full batch completes if nothing is cached."""
        context = mean.prompt + mean.reply / 2
        batch = max(1, min(MAX_NUM_SEQS, int(num_blocks * BLOCK_SIZE / context)))
        decode = mean.reply * self.decode(batch, int(batch * context)) / batch
        return 1 / (decode + mean.prompt * self.prefill_token)


# Qwen3-0.6B in bfloat16 on one H100, from docs/performance.md:
# - context_token: 64 requests of 512 + 256 tokens take 3.28 ms per step, 64 of 2,048 + 128 take 6.9 ms;
# - sequence and base: what is left of the 3.28 ms, and of 1.49 ms for one request of 128 + 256 tokens;
# - prefill_token: 256 prompts of 512 tokens have their first token after 343 ms at the median.
# The decode steps of the other rows (16, 256, 1 of 32,000, 8 of 16,000) follow from these within 8.5%.
H100_QWEN3 = StepCosts(base=1.476e-3, prefill_token=5.2e-6, sequence=3.6e-6, context_token=38.4e-9)
NO_COSTS = StepCosts(0, 0, 0, 0)  # each request ends when it arrives


@dataclass
class Totals:
    """What one replica has done for the requests that are measured."""

    prompt: int = 0  # tokens of prompts
    cached: int = 0  # tokens of prompts that were found in the cache
    computed: int = 0  # tokens of prompts and replies that were computed
    first_tokens: array[float] = field(default_factory=lambda: array("d"))  # seconds from arrival to first token


@dataclass(slots=True)
class Request:
    """A turn of a conversation, from its arrival to the end of its reply."""

    conversation: Conversation
    turn: int
    arrival: float  # seconds
    is_measured: bool

    @property
    def lengths(self) -> Turn:
        return self.conversation.turns[self.turn]


class Replica:
    """One server: a scheduler with its block manager, and the step that it runs.

    Args:
        listener: receives the contents that are cached and dropped.
    """

    def __init__(self, num_blocks: int, costs: StepCosts, listener: Listener | None = None) -> None:
        self.scheduler = Scheduler(
            BlockManager(num_blocks, BlockLayout(BLOCK_SIZE), caching=True, listener=listener),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            preemption="recompute",
            proposer=self._propose,
            max_draft_tokens=MAX_NUM_BATCHED_TOKENS,
            clock=lambda: self._started,
        )
        self.totals = Totals()
        self.ends_at = math.inf  # when the running step ends; infinite if none runs
        self._costs = costs
        self._requests: dict[int, Request] = {}
        self._without_token: set[int] = set()  # keys of the requests that have no token yet
        self._plan: Plan | None = None  # the running step
        self._started = 0.0  # when the running step started
        self._tokens = 1  # tokens of each sequence that it decodes
        self._num_drafts = 0  # draft tokens of each sequence to propose
        self._work = (0, 0)  # its sequences and their context tokens

    def add(self, key: int, request: Request) -> None:
        sampling = SamplingParams(max_tokens=request.lengths.reply)
        prompt = request.conversation.prompt(request.turn)
        self.scheduler.add(GenerateRequest(key, prompt, sampling, 0, frozenset()))
        self._requests[key] = request
        self._without_token.add(key)

    def start_step(self, now: float) -> bool:
        """Start the next step. Return False if there is nothing to do."""
        self._started, self.ends_at = now, math.inf
        self._num_drafts = self._tokens_until_change() - 1
        self._plan = self.scheduler.schedule()
        if self._plan is None:
            assert not self.scheduler.has_work, "no request can run"
            return False
        prefill = context = 0
        for chunk in self._plan.chunks:
            context += chunk.first_sampled
            if not chunk.is_decode:
                prefill += chunk.length
        self._count_prompts(self._plan)
        self._tokens = 1 + min(len(chunk.draft_tokens) for chunk in self._plan.chunks)
        self._work = len(self._plan.chunks), context
        self.ends_at = now + prefill * self._costs.prefill_token + self._costs.decode(*self._work, self._tokens)
        return True

    def cut_step(self, now: float) -> bool:
        """Let a running step that only decodes end after the tokens that it is decoding now. Return whether that is
        earlier than planned."""
        for tokens in range(1, self._tokens):
            ends_at = self._started + self._costs.decode(*self._work, tokens)
            if ends_at >= now:
                self._tokens, self.ends_at = tokens, ends_at
                return True
        return False

    def end_step(self) -> list[Request]:
        """Commit the running step and return the requests that have ended."""
        assert self._plan is not None
        tokens = [
            [chunk.sequence.request.prompt_token_ids[-1]] * self._tokens
            for chunk in self._plan.chunks
            if chunk.sampled_sequences
        ]
        ended = []
        for delta in self.scheduler.commit(self._plan, StepResult(tokens)):
            request = self._requests[delta.key]
            if delta.key in self._without_token:
                self._without_token.remove(delta.key)
                if request.is_measured:
                    self.totals.first_tokens.append(self.ends_at - request.arrival)
            if request.is_measured:
                self.totals.computed += len(delta.token_ids)
            if delta.last:
                ended.append(self._requests.pop(delta.key))
        return ended

    def _tokens_until_change(self) -> int:
        """Return how many tokens of each sequence can be decoded before a prompt has to be computed or a reply ends."""
        running = self.scheduler.running
        if self._without_token or not running:
            return 1
        left = min(group.request.sampling.max_tokens - group.leader.generated for group in running)
        return max(1, min(left, MAX_NUM_BATCHED_TOKENS // len(running)))

    def _propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Propose draft tokens, which stand for further steps."""
        return [0] * min(limit, self._num_drafts)

    def _count_prompts(self, plan: Plan) -> None:
        admitted = set(plan.admitted)
        for chunk in plan.chunks:
            if not chunk.is_decode and self._requests[chunk.sequence.key].is_measured:
                self.totals.computed += chunk.length
                if chunk.sequence.key in admitted:
                    self.totals.prompt += chunk.sequence.num_prompt
                    self.totals.cached += chunk.start


@dataclass(frozen=True)
class Outcome:
    """The figures of one simulation. All except the numbers of requests cover only the requests that are measured."""

    hit_rate: float  # share of the prompts' tokens that was found in the cache
    imbalance: float  # tokens that the busiest replica has computed, as a multiple of the mean
    first_tokens: list[float]  # seconds from arrival to first token
    num_requests: int
    num_ended: int


class Fleet:
    """Replicas behind a router, and the conversations that are going on."""

    def __init__(self, num_replicas: int, policy: str, num_blocks: int, costs: StepCosts) -> None:
        self.now = 0.0
        cached = CachedBlocks(num_replicas, BLOCK_SIZE)
        self.replicas = [
            Replica(num_blocks, costs, listener=cached.listener(index) if policy == "cache-aware" else None)
            for index in range(num_replicas)
        ]
        self._policy: Policy = make_policy(policy, num_replicas, cached)
        self._keys = itertools.count()
        self._num_ended = 0
        self._order = itertools.count()  # breaks ties between events of the same time
        # Events: a request that arrives, or the end of the running step of a replica.
        self._events: list[tuple[float, int, Request | int]] = []

    def run(self, conversations: Iterator[Conversation], count: int, progress: Callable[[int], None]) -> Outcome:
        """Simulate the first `count` conversations to their end.

        Requests are measured from the arrival of the first conversation after WARM_UP to the arrival of the last
        conversation. progress: called with the number of conversations that have started, after each of them.
        """
        started = 0
        following = itertools.islice(conversations, count)
        self._add_first_turn(next(following))
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            if isinstance(event, int):
                self._end_step(event)
                continue
            event.is_measured = WARM_UP * count <= started < count
            if event.turn == 0:
                started += 1
                progress(started)
                if (conversation := next(following, None)) is not None:
                    self._add_first_turn(conversation)
            self._arrive(event)
        return self._outcome()

    def _add_first_turn(self, conversation: Conversation) -> None:
        self._push(conversation.start, Request(conversation, 0, conversation.start, is_measured=False))

    def _push(self, time: float, event: Request | int) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _arrive(self, request: Request) -> None:
        index = self._policy.choose(request.conversation, request.turn)
        replica = self.replicas[index]
        replica.add(next(self._keys), request)
        if replica.ends_at == math.inf:
            self._start_step(index)
        elif replica.cut_step(self.now):
            self._push(replica.ends_at, index)

    def _start_step(self, index: int) -> None:
        if self.replicas[index].start_step(self.now):
            self._push(self.replicas[index].ends_at, index)

    def _end_step(self, index: int) -> None:
        replica = self.replicas[index]
        if replica.ends_at != self.now:
            return  # the step was cut, or has ended already
        for request in replica.end_step():
            self._num_ended += 1
            self._policy.close(index)
            if request.turn + 1 < len(request.conversation.turns):
                arrival = self.now + request.lengths.think
                self._push(arrival, Request(request.conversation, request.turn + 1, arrival, is_measured=False))
        self._start_step(index)

    def _outcome(self) -> Outcome:
        totals = [replica.totals for replica in self.replicas]
        computed = [total.computed for total in totals]
        return Outcome(
            hit_rate=sum(total.cached for total in totals) / sum(total.prompt for total in totals),
            imbalance=max(computed) / statistics.mean(computed),
            first_tokens=[seconds for total in totals for seconds in total.first_tokens],
            num_requests=next(self._keys),
            num_ended=self._num_ended,
        )
