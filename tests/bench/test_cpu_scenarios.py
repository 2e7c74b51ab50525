"""Scenarios of the CPU benchmark, and the figures taken from a run."""

import pytest

from paged_bench._cpu_scenarios import DECODE, PEERS, VLLM_NAME, permute_tokens, scenarios, step_ms
from paged_bench._workload import Job, Run


def test_permuted_tokens_keep_shared_prefixes():
    first, second = permute_tokens(4, [Job([1, 2, 3], 5), Job([1, 2, 4], 6)], 50)
    assert first.prompt[:2] == second.prompt[:2] != [1, 2]
    assert first.prompt[2] != second.prompt[2]


def test_step_time_needs_all_sequences_decoding():
    stamps = [[1.0, 2.0, 3.0, 7.0, 11.0, 12.0], [3.0, 7.0, 11.0, 15.0, 16.0, 17.0]]
    assert step_ms(Run(17.0, 2, stamps), []) == 4000.0
    with pytest.raises(ValueError, match="no step in which all 2 sequences decode"):
        step_ms(Run(4.0, 2, [[1.0, 2.0], [3.0, 4.0]]), [])


def test_scenarios_and_their_targets():
    found = {one.name: one for one in scenarios(1000, 2048, 8.0, quick=False)}
    assert found[DECODE].target == 20.0
    assert list(found[DECODE].ratios.values()) == [1.5, 2.5, 10.0]
    assert [(len(job.prompt), job.output) for job in found[DECODE].jobs] == [(512, 64)] * 16
    even = [
        found[f"even lengths{how}"] for how in ("", ", 8 requests/s", ", 4 samples", " behind 512 tokens in common")
    ]
    assert all(one.ratios == {VLLM_NAME: 1.3} and len(one.jobs) == 32 for one in even)
    assert sum(job.output for job in even[0].jobs) == 3260
    assert even[1].jobs[-1].arrival > 0
    assert {job.n for job in even[2].jobs} == {4}
    assert len({tuple(job.prompt[:512]) for job in even[3].jobs}) == 1
    for quick in (False, True):
        covered = {who for one in scenarios(1000, 2048, 8.0, quick) for who in one.ratios}
        assert covered == {who for names in PEERS.values() for who in names}
