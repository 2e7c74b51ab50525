"""The simulation of a fleet."""

import pytest

from paged_bench._fleet_routing import POLICIES
from paged_bench._fleet_simulation import H100_QWEN3, NO_COSTS, Fleet, Replica
from paged_bench._fleet_workload import Workload, mean_lengths
from paged_bench._report import percentile


def simulate(policy, *, replicas=4, blocks=2048, conversations=150, seed=1, rate=16.0, costs=H100_QWEN3):
    fleet = Fleet(replicas, policy, blocks, costs)
    return fleet, fleet.run(iter(Workload(8, rate, seed)), conversations, lambda started: None)


@pytest.fixture(scope="module")
def outcomes():
    return {policy: simulate(policy)[1] for policy in POLICIES}


@pytest.mark.nightly
def test_the_seed_determines_the_outcome(outcomes):
    assert simulate("cache-aware")[1] == outcomes["cache-aware"]
    assert simulate("cache-aware", seed=2)[1] != outcomes["cache-aware"]


def test_policies_that_keep_conversations_at_a_replica_hit_more(outcomes):
    rates = {policy: outcome.hit_rate for policy, outcome in outcomes.items()}
    limit = simulate("round-robin", replicas=1, blocks=4 * 2048, costs=NO_COSTS)[1].hit_rate
    assert max(rates["round-robin"], rates["least-loaded"]) < rates["hashing"] < limit
    assert rates["hashing"] <= rates["cache-aware"] < limit


def test_round_robin_spreads_the_load_evenly(outcomes):
    assert outcomes["round-robin"].imbalance == pytest.approx(1, abs=0.2)
    assert all(outcome.imbalance >= 1 for outcome in outcomes.values())


def test_all_requests_of_all_conversations_end(outcomes):
    conversations = iter(Workload(8, 16.0, 1))
    turns = sum(len(next(conversations).turns) for _ in range(150))
    for outcome in outcomes.values():
        assert outcome.num_requests == outcome.num_ended == turns
        assert 0 < len(outcome.first_tokens) < turns
        assert min(outcome.first_tokens) > H100_QWEN3.base


def test_pools_keep_their_size_when_requests_are_preempted(monkeypatch):
    used = []
    start = Replica.start_step

    def start_step(self, now):
        started = start(self, now)
        self.scheduler.check()
        used.append(self.scheduler.stats.blocks_used)
        return started

    monkeypatch.setattr(Replica, "start_step", start_step)
    fleet, outcome = simulate("hashing", replicas=1, blocks=512, conversations=25)
    stats = fleet.replicas[0].scheduler.stats
    assert stats.recomputed > 0
    assert 400 < max(used) <= 512
    assert outcome.num_ended == outcome.num_requests
    assert stats.blocks_used == 0
    fleet.replicas[0].scheduler.blocks.check([])


@pytest.mark.nightly
def test_several_tokens_in_a_step_change_nothing(monkeypatch):
    """Without eviction, whose order may differ."""
    _, together = simulate("hashing", blocks=16_384, conversations=60)
    monkeypatch.setattr(Replica, "_tokens_until_change", lambda self: 1)
    _, single = simulate("hashing", blocks=16_384, conversations=60)
    assert together.first_tokens == pytest.approx(single.first_tokens)
    assert (together.hit_rate, together.imbalance) == pytest.approx((single.hit_rate, single.imbalance))


def test_a_fleet_that_computes_nothing_in_time_answers_at_once():
    _, outcome = simulate("round-robin", replicas=1, blocks=16_384, costs=NO_COSTS)
    assert set(outcome.first_tokens) == {0.0}


@pytest.mark.nightly
def test_more_load_makes_requests_wait_longer():
    light, heavy = (simulate("round-robin", replicas=1, rate=rate)[1].first_tokens for rate in (1.0, 20.0))
    assert percentile(heavy, 0.99) > 2 * percentile(light, 0.99)


@pytest.mark.parametrize(
    ("sequences", "context", "milliseconds"),
    [
        (1, 256, 1.49),
        (16, 640, 1.90),
        (64, 640, 3.28),
        (64, 2112, 6.9),
        (256, 576, 7.45),
        (1, 32_032, 2.68),
        (8, 16_032, 6.3),
    ],
)
def test_decode_steps_take_the_measured_times(sequences, context, milliseconds):
    assert 1e3 * H100_QWEN3.decode(sequences, sequences * context) == pytest.approx(milliseconds, rel=0.085)


def test_several_decode_steps_take_the_sum_of_their_times():
    steps = [H100_QWEN3.decode(3, 100 + 3 * step) for step in range(5)]
    assert H100_QWEN3.decode(3, 100, tokens=5) == pytest.approx(sum(steps))


def test_capacity_grows_with_the_blocks():
    mean = mean_lengths(8, seed=1)
    few, many, most = (H100_QWEN3.capacity(mean, blocks) for blocks in (512, 4096, 16_384))
    assert few < many < most == H100_QWEN3.capacity(mean, 32_768)
