"""Routing policies for the simulation of a fleet."""

from itertools import islice

import pytest

from paged_backend.api.request import Origin
from paged_backend.scheduling.content import Chain
from paged_bench._fleet_routing import POLICIES, CachedBlocks, GatewayRouter, LeastLoaded, make_policy
from paged_bench._fleet_simulation import BLOCK_SIZE, H100_QWEN3, Fleet
from paged_bench._fleet_workload import Workload

CONVERSATIONS = list(islice(Workload(2, 1.0, seed=1), 30))


def policy(name, replicas=3):
    return make_policy(name, replicas, CachedBlocks(replicas, BLOCK_SIZE), lambda: 0.0)


def test_round_robin_takes_replicas_in_turn():
    chosen = policy("round-robin")
    assert [chosen.choose(one, 0) for one in CONVERSATIONS[:6]] == [0, 1, 2, 0, 1, 2]


def test_least_loaded_takes_the_replica_with_the_fewest_open_requests():
    chosen = LeastLoaded(3)
    assert [chosen.choose(CONVERSATIONS[0], 0) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    chosen.close(1)
    assert chosen.choose(CONVERSATIONS[0], 0) == 1


@pytest.mark.parametrize("name", ["hashing", "cache-aware"])
def test_all_turns_of_a_conversation_go_to_one_replica(name):
    chosen = policy(name)
    used = set()
    for one in CONVERSATIONS:
        replicas = set()
        for turn in range(len(one.turns)):
            replicas.add(chosen.choose(one, turn))
            chosen.close(max(replicas))
        assert len(replicas) == 1
        used |= replicas
    assert used == {0, 1, 2}


def test_every_policy_uses_all_replicas_of_an_overloaded_fleet():
    for name in POLICIES:
        chosen = policy(name)
        assert {chosen.choose(one, 0) for one in CONVERSATIONS} == {0, 1, 2}


def test_cached_blocks_are_those_that_the_block_managers_find(monkeypatch):
    """The pools are small enough that blocks are evicted."""
    fleet = Fleet(3, "cache-aware", 600, H100_QWEN3)
    routed, compared = GatewayRouter.choose, []

    def choose(self, conversation, turn):
        prompt = conversation.prompt(turn)
        for replica, share in zip(fleet.replicas, self._cached.shares(conversation, turn), strict=True):
            hit = replica.scheduler.blocks.match(Chain(Origin("")), prompt)
            compared.append(share)
            assert share == pytest.approx(len(hit.blocks) * BLOCK_SIZE / len(prompt))
        return routed(self, conversation, turn)

    monkeypatch.setattr(GatewayRouter, "choose", choose)
    fleet.run(iter(Workload(4, 12.0, seed=1)), 100, lambda started: None)
    assert min(compared) == 0 and max(compared) > 0.5
    assert all(replica.scheduler.stats.evictions for replica in fleet.replicas)
