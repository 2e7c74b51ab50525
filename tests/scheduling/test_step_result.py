"""Verification of draft tokens."""

import pytest

from paged_backend.scheduling.step_result import accept_draft_tokens


@pytest.mark.parametrize(
    ("sampled", "draft_tokens", "expected"),
    [([1, 2, 3], [1, 2], [1, 2, 3]), ([1, 9, 3], [1, 2], [1, 9]), ([9, 2, 3], [1, 2], [9])],
)
def test_tokens_after_rejected_draft_are_dropped(sampled, draft_tokens, expected):
    assert accept_draft_tokens(sampled, draft_tokens) == expected
