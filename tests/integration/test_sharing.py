"""Random loads of requests that share, copy, evict and swap blocks: each sample gets its isolated output."""

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scheduler_stress import CONDITIONS, DROPPING, PIPELINED, run_stress

EVENTS = (  # each occurs in any long run of the stress test
    "add", "abort while waiting", "abort while running", "abort in flight", "abort of unknown request",
    "end of a sample", "end of a session", "reset", "spill", "step", "failed step", "failed row",
    "failed moves", "no request fits",
    "beam output", "adapter output", "session output", "blocks from disk", "blocks to disk",
    "recomputed", "swapped", "cached_tokens", "host_tokens", "evictions", "copies", "moves_out", "moves_in",
    "draft_tokens", "accepted_tokens", "blocks_pinned",
    "scored prompt", "scores from the cache", "digest", "masks left out",
)  # fmt: skip


@pytest.mark.parametrize(
    "conditions", [CONDITIONS, DROPPING, PIPELINED], ids=["full attention", "sliding windows", "stages"]
)
@pytest.mark.parametrize("examples", [20, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_random_load_gives_each_sample_its_isolated_output(examples, conditions, figures, until):
    seen = Counter()
    strategies = {name: st.sampled_from(values) for name, values in conditions.items()}

    @settings(max_examples=examples, deadline=None)
    @given(seed=st.integers(0, 2**32), **strategies)
    def run(**conditions):
        if time.monotonic() < until:
            run_stress(seen, **conditions)

    run()
    if examples >= 1000:
        assert all(seen[name] for name in EVENTS), seen
    assert bool(seen["several steps in flight"]) == (conditions is PIPELINED)
    figures(f"{seen['step']:,} steps of the scheduler, {seen['add']:,} requests, chosen by hypothesis")
