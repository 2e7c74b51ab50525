"""The prefill budget follows the times of steps."""

from paged_backend.scheduling.budgets import MAX_PREFILL_STEPS, PrefillBudget


def test_prefill_gets_half_of_step_when_decode_is_slow():
    budget = PrefillBudget(0.1, 0.001, 512)
    budget.record_step(0, 0.2)  # decode alone
    budget.record_step(100, 0.3)
    assert budget.tokens == 133
    budget.record_step(0, 0.01)
    budget.record_step(133, 0.2)
    assert budget.tokens == 66


def test_short_last_chunk_does_not_raise_prefill_budget():
    budget = PrefillBudget(0.1, 0.001, 512)
    budget.record_step(30, 0.04)
    assert budget.tokens == 100
    budget.record_step(100, 0.04)
    assert budget.tokens == 200


def test_minimum_and_decode_ratio():
    """As on a GPU: the target follows decode-only steps, and a number of prompt tokens is always possible."""
    budget = PrefillBudget(0.002, 4e-6, 8192, min_tokens=256, decode_ratio=2.5)
    assert budget.tokens == 500
    budget.record_step(0, 0.004)  # target: 10 ms
    budget.record_step(500, 0.005)
    assert budget.tokens == 1000
    for _ in range(8):
        budget.record_step(budget.tokens, 1.0)
    assert budget.tokens == 256


def test_prompts_arriving_beside_decode_keep_steps_below_three_decode_steps():
    """A step takes 3.3 ms and 4.2 us per prompt token. The 99th percentile of its time is that of the longest."""
    budget = PrefillBudget(2.5 * 0.0015, 4.2e-6, 8192, min_tokens=256, decode_ratio=2.5)
    budget.record_step(0, 0.0033)
    seconds = []
    for _ in range(200):
        seconds.append(0.0033 + budget.tokens * 4.2e-6)
        budget.record_step(budget.tokens, seconds[-1])
    assert max(seconds) < 3 * 0.0033
    assert budget.tokens > 1000


def test_decode_is_measured_while_prompts_arrive_without_a_pause():
    """A step without prompt tokens follows after MAX_PREFILL_STEPS steps with some, and changes the target."""
    budget = PrefillBudget(0.002, 4e-6, 8192, min_tokens=256, decode_ratio=2.5)
    limits = []
    for _ in range(MAX_PREFILL_STEPS):
        limits.append(budget.tokens)
        budget.record_step(budget.tokens, 0.006 + budget.tokens * 4e-6)  # more sequences decode than at first
    assert min(limits) == limits[-1] == 256
    assert budget.tokens == 0
    budget.record_step(0, 0.006)
    for _ in range(4):
        budget.record_step(budget.tokens, 0.006 + budget.tokens * 4e-6)
    assert budget.tokens > 1000
