"""What the time of one tenant's requests tells another of the cache: nothing. A probe is a prompt that a neighbour has
sent before, or has not; who sees the probe's time to its first token guesses which. Half of the guesses are right where
the salts differ, as at random, and nearly all where they are the same."""

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

LENGTH = 32  # tokens of a prompt: two steps, or one after what the cache has
LONG = 96  # six steps or one: on the clock, beside whatever else the machine does
POOL = {"num_gpu_blocks_override": 512}


def area(known, unknown):
    """Under the curve of who guesses by a threshold: the share of pairs in which the known one took less."""
    ordered = sorted(unknown)
    wins = sum(len(ordered) - bisect_right(ordered, one) for one in known)
    ties = sum(bisect_right(ordered, one) - bisect_left(ordered, one) for one in known)
    return (wins + ties / 2) / (len(known) * len(unknown))


def steps_of(engine, prompt, salt):
    """How many steps a probe takes to its first token, which is what its time comes to without the noise; and how many
    of its tokens were in the cache."""
    hits, before = engine.assembly.scheduler.stats.cached_tokens, len(engine.history)
    engine.wait(engine.submit(prompt, cache_salt=salt, max_tokens=1))
    computed = sum(bool(output.stats.context_tokens) for output in engine.history[before:])
    return computed, engine.assembly.scheduler.stats.cached_tokens - hits


def probed(ask, salt, pairs, seed=1, length=LENGTH):
    """What probes give: (of prompts that `victim` has sent before, of others), each in the order of the pairs. A salt
    of None is a new one for each, so that no probe finds what another of its own has left."""
    rng, known, unknown = random.Random(seed), [], []
    for index in range(pairs):
        prompt, other = ([rng.randrange(256) for _ in range(length)] for _ in range(2))
        ask(prompt, "victim")
        found = [(known, prompt), (unknown, other)]
        rng.shuffle(found)
        for number, (into, probe) in enumerate(found):
            into.append(ask(probe, salt or f"{seed} {index} {number}"))
    return known, unknown


def test_cache_salt_hides_step_counts(tiny):
    with running(tiny_assembly(tiny[0], **POOL)) as engine:
        for salt, pairs in ((None, 1000), ("victim", 50)):
            known, unknown = probed(functools.partial(steps_of, engine), salt, pairs)
            found = area([steps for steps, _ in known], [steps for steps, _ in unknown])
            hits = sum(hits for _, hits in known + unknown)
            if salt is None:
                table.done("tokens found in the cache under another salt, by probes", hits, of=len(known + unknown))
            assert (found, hits) == (0.5, 0) if salt is None else found > 0.9 and hits > 0


@pytest.mark.nightly
def test_cache_salt_hides_time_to_first_token(tiny, in_time, figures):
    """Seconds to the first token, as a client has them, of 200,000 probes, or as many as there is time for."""
    areas, hits = {}, []  # tokens that a probe of another salt has found
    with serving(tiny[0], **POOL) as server:

        def seconds(prompt, salt):
            sampling = json.dumps({"cache_salt": salt, "max_tokens": 1})
            began = time.perf_counter()
            answer = server.ask(input_ids=prompt, sampling_parameters=sampling, return_receipt=True)
            took = time.perf_counter() - began
            if salt != "victim":
                hits.append(json.loads(answer["receipt"][0])["cached_tokens"])
            return took

        areas["within one"] = area(*probed(seconds, "victim", 1000, length=LONG))
        rounds = [probed(seconds, None, 1000, seed, LONG) for seed in in_time(range(1, 101))]
        areas["across salts"] = area(*(list(itertools.chain(*probes)) for probes in zip(*rounds, strict=True)))
    figures(f"area under the curve: {areas}")
    table.done("tokens found in the cache under another salt, by probes", sum(hits), of=len(hits))
    assert len(hits) >= 2000 and not any(hits)
    assert areas["across salts"] == pytest.approx(0.5, abs=0.05)
    assert areas["within one"] > 0.9
