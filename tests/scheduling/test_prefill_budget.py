"""The prefill budget follows the times of steps."""

from paged_backend.scheduling.prefill_budget import PrefillBudget


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
