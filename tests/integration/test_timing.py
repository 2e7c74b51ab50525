"""Timing side channel of the prefix cache: with different cache salts, tenants learn nothing of each other.

A probe is a prompt that another tenant has or has not sent before. From the probe's time to first token an attacker
guesses which. With different salts half of the guesses are right, as at random; with the same salt nearly all are."""

import functools
import itertools
import json
import random
import time
from bisect import bisect_left, bisect_right

import pytest

from tests.support.callers import serving
from tests.support.in_process import running, tiny_assembly
from tests.support.stress import table

LENGTH = 32  # tokens of a prompt: two steps, or one with a cache hit
LONG = 96  # six steps or one: enough to be measured on a busy machine
POOL = {"num_gpu_blocks_override": 512}


def area(known, unknown):
    """Return the area under the ROC curve of guessing by a threshold: the share of pairs in which the known probe took
    less."""
    ordered = sorted(unknown)
    wins = sum(len(ordered) - bisect_right(ordered, value) for value in known)
    ties = sum(bisect_right(ordered, value) - bisect_left(ordered, value) for value in known)
    return (wins + ties / 2) / (len(known) * len(unknown))


def steps_of(engine, prompt, salt):
    """Return how many steps a probe takes to its first token, which is its time without noise, and how many of its
    tokens were cache hits."""
    hits, before = engine.assembly.scheduler.stats.cached_tokens, len(engine.history)
    engine.wait(engine.submit(prompt, cache_salt=salt, max_tokens=1))
    computed = sum(bool(output.stats.context_tokens) for output in engine.history[before:])
    return computed, engine.assembly.scheduler.stats.cached_tokens - hits


def probed(ask, salt, pairs, seed=1, length=LENGTH):
    """Return the results of probes: (of prompts that the neighbour has sent before, of others), in the order of the
    pairs. salt: None for a new salt for each probe, so that no probe hits another probe's blocks."""
    rng, known, unknown = random.Random(seed), [], []
    for index in range(pairs):
        prompt, other = ([rng.randrange(256) for _ in range(length)] for _ in range(2))
        ask(prompt, "neighbour")
        found = [(known, prompt), (unknown, other)]
        rng.shuffle(found)
        for number, (into, probe) in enumerate(found):
            into.append(ask(probe, salt or f"{seed} {index} {number}"))
    return known, unknown


def test_cache_salt_hides_step_counts(tiny):
    with running(tiny_assembly(tiny[0], **POOL)) as engine:
        for salt, pairs in ((None, 100), ("neighbour", 20)):
            known, unknown = probed(functools.partial(steps_of, engine), salt, pairs)
            found = area([steps for steps, _ in known], [steps for steps, _ in unknown])
            hits = sum(hits for _, hits in known + unknown)
            if salt is None:
                table.record("cache hits under another salt, by probes", hits, of=len(known + unknown))
            assert (found, hits) == (0.5, 0) if salt is None else found > 0.9 and hits > 0


@pytest.mark.nightly
def test_cache_salt_hides_time_to_first_token(tiny, in_time, figures):
    """The attacker measures the seconds to first token of 200,000 probes, or of as many as there is time for."""
    areas, hits = {}, []  # cached tokens of each probe with another salt
    with serving(tiny[0], **POOL) as server:

        def seconds(prompt, salt):
            sampling = json.dumps({"cache_salt": salt, "max_tokens": 1})
            started = time.perf_counter()
            answer = server.ask(input_ids=prompt, sampling_parameters=sampling, return_receipt=True)
            took = time.perf_counter() - started
            if salt != "neighbour":
                hits.append(json.loads(answer["receipt"][0])["cached_tokens"])
            return took

        areas["within one"] = area(*probed(seconds, "neighbour", 1000, length=LONG))
        rounds = [probed(seconds, None, 1000, seed, LONG) for seed in in_time(range(1, 101))]
        areas["across salts"] = area(*(list(itertools.chain(*probes)) for probes in zip(*rounds, strict=True)))
    figures(f"area under the curve: {areas}")
    table.record("cache hits under another salt, by probes", sum(hits), of=len(hits))
    assert len(hits) >= 2000 and not any(hits)
    assert areas["across salts"] == pytest.approx(0.5, abs=0.05)
    assert areas["within one"] > 0.9
