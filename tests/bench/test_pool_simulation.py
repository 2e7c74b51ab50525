"""Simulated block pools: the slots in use, and those that other allocators would use."""

from dataclasses import replace

import pytest

from paged_bench._pool_simulation import RESERVATION, Sample, requests, simulate, utilisation


@pytest.mark.parametrize("sampling", [{}, {"n": 2}])
def test_allocated_slots_are_those_computed_from_the_lengths(sampling):
    samples = list(simulate(requests("ShareGPT", 120, sampling, equal=True), block_size=16))
    assert samples
    for one in samples:
        assert one.live <= one.allocated <= one.unshared
        assert one.oracle <= one.power_of_two <= one.maximum
        assert one.maximum == RESERVATION * one.requests * sampling.get("n", 1)
    assert utilisation(samples, "allocated") == pytest.approx(utilisation(samples, "analytic"), rel=0.02)


def test_utilisation_weighs_samples_by_their_slots():
    small = Sample(1, live=10, allocated=10, unshared=0, analytic=0, maximum=0, power_of_two=0, oracle=0)
    assert utilisation([small, replace(small, live=10, allocated=90)], "allocated") == 0.2
