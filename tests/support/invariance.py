"""Random requests whose logits must have the same bits in every batch, and what each gets alone."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_backend.api.token_outputs import Fingerprint, Logprobs
from paged_backend.engine.outputs import StepOutput
from tests.support.in_process import WAIT, EngineHarness, running
from tests.support.tiny_family import TinyFamily

INVARIANT = {"dtype": "bfloat16", "batch_invariant": True}
ALONE = {"enable_prefix_caching": False, "max_num_batched_tokens": 64, "block_size": 16, "num_gpu_blocks_override": 32}
NUM_SHARED = 3  # beginnings that prompts share


@dataclass(frozen=True)
class Ask:
    """A request: its prompt and sampling parameters."""

    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]

    @property
    def fingerprints(self) -> int:
        """The number of positions whose logits are compared."""
        scored = len(self.prompt) - 1 if "prompt_logprobs" in self.sampling else 0
        return scored + self.sampling.get("n", 1) * self.sampling["max_tokens"]


@dataclass
class Bits:
    """What a request has got, by sample: tokens, fingerprints of logits, and log probabilities."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    fingerprints: dict[int, list[Fingerprint]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[Logprobs]] = field(default_factory=lambda: defaultdict(list))
    prompt: list[Any] = field(default_factory=list)


def random_asks(rng: random.Random, count: int, *, longest: int = 40, adapters: Sequence[str | None] = (None,)):
    """Return random requests, many with a common beginning."""
    starts = [[rng.randrange(3, 320) for _ in range(longest)] for _ in range(NUM_SHARED)]
    return [_random_ask(rng, starts, longest, adapters) for _ in range(count)]


def _random_ask(rng: random.Random, starts: list[list[int]], longest: int, adapters: Sequence[str | None]) -> Ask:
    length = rng.randint(1, longest)
    shared = rng.choice([0, rng.randint(0, length)])
    prompt = rng.choice(starts)[:shared] + [rng.randrange(3, 320) for _ in range(length - shared)]
    if rng.random() < 0.3:  # repeats itself, which prompt lookup finds
        prompt = (prompt[:5] * longest)[:length]
    sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 15), "logits_digest": True}
    if rng.random() < 0.5:
        sampling |= {"temperature": 1.0, "seed": rng.randrange(1000), "n": rng.choice([1, 1, 2, 3])}
    if rng.random() < 0.3:
        sampling["prompt_logprobs"] = 2
    if rng.random() < 0.3:
        sampling["logprobs"] = rng.choice([0, 3, 20])
    if (adapter := rng.choice(adapters)) is not None:
        sampling["lora_name"] = adapter
    return Ask(tuple(prompt), sampling)


def run(engine: EngineHarness, asks: Iterable[Ask]) -> list[Bits]:
    """Run requests together and return what each gets."""
    found, open_samples = {}, 0
    for ask in asks:
        found[engine.submit(ask.prompt, **ask.sampling)] = Bits()
        open_samples += ask.sampling.get("n", 1)
    while open_samples:
        output = engine.steps.get(timeout=WAIT)
        assert isinstance(output, StepOutput), output
        engine.history.append(output)
        for delta in output.deltas:
            assert delta.error is None, delta.error
            bits = found[delta.key]
            bits.tokens[delta.sample] += delta.token_ids
            bits.fingerprints[delta.sample] += delta.values.get("fingerprints", ())
            bits.logprobs[delta.sample] += delta.values.get("logprobs", ())
            bits.prompt += [value for values in (delta.prompt_values or {}).values() for value in values]
            open_samples -= delta.finish is not None
    return list(found.values())


def run_alone(family: TinyFamily, asks: Iterable[Ask], *, adapters: Any = None, **options: Any) -> list[Bits]:
    """Run each request by itself, without a prefix cache, and its prompt in one chunk."""
    with running(family.assembly(adapters=adapters, **INVARIANT | ALONE | options)) as engine:
        return [run(engine, [ask])[0] for ask in asks]
