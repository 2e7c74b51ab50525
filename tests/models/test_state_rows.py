"""The rows of a packed batch are divided into batches of decode rows and the chunks of prompts."""

from paged_backend.models.state_rows import StateChunk, state_rows


def decodes(rows):
    """Return (rows, sources, targets) of each batch of decode rows."""
    return [
        tuple(None if part is None else part.tolist() for part in (one.rows, one.sources, one.targets))
        for one in rows.decodes
    ]


def test_decode_rows_and_chunks_of_a_mixed_step():
    rows = state_rows(slots=[4, 0, 7, 2], starts=[9, 0, 30, 5], lengths=[1, 3, 1, 4], draft_slots=[()] * 4)
    assert decodes(rows) == [([0, 4], [4, 7], [4, 7])]
    assert rows.chunks == (StateChunk(1, 3, 0, is_start=True), StateChunk(5, 4, 2, is_start=False))


def test_decode_step_needs_no_rows():
    rows = state_rows(slots=[4, 0], starts=[9, 1], lengths=[1, 1], draft_slots=[(), ()])
    assert decodes(rows) == [(None, [4, 0], [4, 0])]
    assert rows.chunks == ()


def test_prompt_of_one_token_does_not_decode():
    """It must not read the state in its slot."""
    rows = state_rows(slots=[4, 0], starts=[0, 1], lengths=[1, 1], draft_slots=[(), ()])
    assert decodes(rows) == [([1], [0], [0])]
    assert rows.chunks == (StateChunk(0, 1, 4, is_start=True),)


def test_draft_tokens_run_after_each_other():
    """Each reads the state that the token before it has left, and leaves its own in another slot."""
    rows = state_rows(slots=[4, 0, 7], starts=[9, 1, 8], lengths=[3, 1, 2], draft_slots=[(5, 6), (), (3,)])
    assert decodes(rows) == [
        ([0, 3, 4], [4, 0, 7], [4, 0, 7]),
        ([1, 5], [4, 7], [5, 3]),
        ([2], [5], [6]),
    ]
    assert rows.chunks == ()


def test_step_of_prompts_has_no_decode_rows():
    rows = state_rows(slots=[4], starts=[2], lengths=[3], draft_slots=[()])
    assert decodes(rows) == []
    assert rows.chunks == (StateChunk(0, 3, 4, is_start=False),)
