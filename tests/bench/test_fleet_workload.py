"""Conversations for the simulation of a fleet."""

from collections import Counter
from itertools import islice, pairwise

import pytest

from paged_bench._fleet_workload import (
    MAX_CONTEXT,
    MAX_PROMPTS,
    MAX_TURNS,
    SYSTEM_TOKENS,
    Workload,
    mean_lengths,
    num_prompts,
)


def some(count=2000, *, seed=1, rate=10.0):
    return list(islice(Workload(8, rate, seed), count))


def test_the_seed_determines_the_conversations():
    assert some(50) == some(50)
    assert some(50, seed=2) != some(50)


def test_the_rate_changes_times_only():
    slow, fast = some(50), some(50, rate=20.0)
    assert [one.turns for one in slow] == [one.turns for one in fast]
    assert [one.start for one in slow] == pytest.approx([2 * one.start for one in fast])


def test_lengths_and_times():
    conversations = some()
    for one in conversations:
        assert SYSTEM_TOKENS[0] <= one.system_tokens <= SYSTEM_TOKENS[1]
        assert 1 <= len(one.turns) <= MAX_TURNS
        assert one.turns[0].prompt > one.system_tokens
        assert one.turns[-1].prompt + one.turns[-1].reply <= MAX_CONTEXT
        for turn, following in pairwise(one.turns):
            assert following.prompt > turn.prompt + turn.reply
    assert 2000 / conversations[-1].start == pytest.approx(10, rel=0.1)
    mean = mean_lengths(8, seed=1)
    replies = [turn.reply for one in conversations for turn in one.turns]
    assert mean.reply == pytest.approx(338, rel=0.05) == sum(replies) / len(replies)
    assert 2 < mean.turns < 3


def test_first_system_prompts_are_the_most_popular():
    counts = Counter(one.system for one in some())
    assert set(counts) == set(range(8))
    assert counts[0] == pytest.approx(2 * counts[1], rel=0.2)


def test_prompts_continue_the_text_and_differ_after_the_system_prompt():
    first, second = [one for one in some() if one.system == 0 and len(one.turns) > 1][:2]
    assert first.prompt(1)[: first.turns[0].prompt] == first.prompt(0)
    assert len(first.prompt(1)) == first.turns[1].prompt
    assert first.prompt(0)[: first.system_tokens] == second.prompt(0)[: first.system_tokens]
    assert not {*first.prompt(0)[first.system_tokens :]} & {*second.prompt(0)}


def test_number_of_system_prompts_is_limited():
    assert [num_prompts(1), num_prompts(4), num_prompts(256)] == [2, 8, MAX_PROMPTS]
