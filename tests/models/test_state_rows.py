"""The rows of a packed batch are divided into one batch of decode rows and the chunks of prompts."""

from paged_backend.models.state_rows import StateChunk, state_rows


def test_decode_rows_and_chunks_of_a_mixed_step():
    rows = state_rows(slots=[4, 0, 7, 2], starts=[9, 0, 30, 5], lengths=[1, 3, 1, 4])
    assert rows.decode_slots.tolist() == [4, 7]
    assert rows.decode_rows.tolist() == [0, 4]
    assert rows.chunks == (StateChunk(1, 3, 0, is_start=True), StateChunk(5, 4, 2, is_start=False))


def test_decode_step_needs_no_rows():
    rows = state_rows(slots=[4, 0], starts=[9, 1], lengths=[1, 1])
    assert rows.decode_slots.tolist() == [4, 0]
    assert rows.decode_rows is None
    assert rows.chunks == ()


def test_prompt_of_one_token_does_not_decode():
    """It must not read the state in its slot."""
    rows = state_rows(slots=[4, 0], starts=[0, 1], lengths=[1, 1])
    assert rows.decode_slots.tolist() == [0]
    assert rows.decode_rows.tolist() == [1]
    assert rows.chunks == (StateChunk(0, 1, 4, is_start=True),)
