"""Which replica runs a request."""

from paged_backend.server.connections import replicas
from paged_backend.server.connections.replicas import LOAD_SLACK, ReplicaChoice

SHARED = list(range(100))  # the beginning of several prompts


def test_prompts_with_the_same_beginning_run_in_one_replica():
    choice = ReplicaChoice(3, block_size=4)
    first = choice.choose("", [*SHARED, 1, 2], [5, 5, 5])
    for number, question in enumerate(([7] * 8, [8] * 8, [9] * 8)):
        loads = [number] * 3
        loads[first] += 3  # more than the others
        assert choice.choose("", SHARED + question, loads) == first


def test_other_prompts_run_where_the_load_is_least():
    choice = ReplicaChoice(3, block_size=4)
    assert choice.choose("", [1] * 40, [2, 1, 3]) == 1
    assert choice.choose("", [2] * 40, [2, 3, 1]) == 2
    assert choice.choose("", [1] * 12 + [3] * 28, [0, 2, 2]) == 0  # too little of it was computed in 1


def test_replica_with_too_many_requests_is_not_preferred():
    choice = ReplicaChoice(2, block_size=4)
    assert choice.choose("", SHARED, [0, 1]) == 0
    mean = (2 * LOAD_SLACK + 1) / 2
    assert choice.choose("", SHARED, [mean + LOAD_SLACK - 1, 1]) == 0
    assert choice.choose("", SHARED, [100, 1]) == 1
    assert choice.choose("", SHARED, [1, 1]) == 0  # both have computed it; the first of them is as good


def test_tenants_share_nothing():
    choice = ReplicaChoice(2, block_size=4)
    assert choice.choose(("a", None), SHARED, [0, 1]) == 0
    assert choice.choose(("b", None), SHARED, [1, 0]) == 1
    assert choice.choose(("a", None), SHARED, [1, 0]) == 0


def test_oldest_prompts_are_forgotten(monkeypatch):
    monkeypatch.setattr(replicas, "MAX_KNOWN_BLOCKS", 25)
    choice = ReplicaChoice(2, block_size=4)
    assert choice.choose("", SHARED, [0, 1]) == 0
    assert choice.choose("", SHARED, [1, 0]) == 0
    assert choice.choose("", [5] * 100, [0, 1]) == 0
    assert choice.choose("", SHARED, [1, 0]) == 1


def test_short_prompt_runs_where_the_load_is_least():
    assert ReplicaChoice(2, block_size=16).choose("", [1, 2, 3], [4, 3]) == 1
