"""The rows of a packed batch are divided into batches of decode rows and the chunks of prompts."""

from paged_backend.execution.batch import consecutive_pages
from paged_backend.models import state_rows as module


def state_rows(blocks, starts, lengths, draft_blocks):
    """Return the rows of a step with states of two pages: block `b` has the pages `b` and `b + 1`."""
    return module.state_rows(blocks, starts, lengths, draft_blocks, consecutive_pages(2))


def blocks_of(pages):
    """Return the blocks with these pages."""
    assert all(second == first + 1 for first, second in pages.tolist())
    return pages[:, 0].tolist()


def decodes(rows):
    """Return (rows, sources, targets) of each batch of decode rows."""
    return [
        (
            None if one.rows is None else one.rows.tolist(),
            blocks_of(one.sources),
            None if one.targets is None else blocks_of(one.targets),
        )
        for one in rows.decodes
    ]


def chunks(rows):
    """Return (first row, length, block, whether it starts) of each chunk."""
    return [(one.first_row, one.length, *blocks_of(one.pages), one.is_start) for one in rows.chunks]


def test_decode_rows_and_chunks_of_a_mixed_step():
    rows = state_rows([4, 0, 7, 2], starts=[9, 0, 30, 5], lengths=[1, 3, 1, 4], draft_blocks=[()] * 4)
    assert decodes(rows) == [([0, 4], [4, 7], None)]
    assert chunks(rows) == [(1, 3, 0, True), (5, 4, 2, False)]


def test_decode_step_needs_no_rows():
    rows = state_rows([4, 0], starts=[9, 1], lengths=[1, 1], draft_blocks=[(), ()])
    assert decodes(rows) == [(None, [4, 0], None)]
    assert chunks(rows) == []


def test_prompt_of_one_token_does_not_decode():
    """It must not read the state in its block."""
    rows = state_rows([4, 0], starts=[0, 1], lengths=[1, 1], draft_blocks=[(), ()])
    assert decodes(rows) == [([1], [0], None)]
    assert chunks(rows) == [(0, 1, 4, True)]


def test_draft_tokens_run_after_each_other():
    """Each reads the state that the token before it has left, and leaves its own in another block."""
    rows = state_rows([4, 0, 7], starts=[9, 1, 8], lengths=[3, 1, 2], draft_blocks=[(5, 6), (), (3,)])
    assert decodes(rows) == [
        ([0, 3, 4], [4, 0, 7], None),
        ([1, 5], [4, 7], [5, 3]),
        ([2], [5], [6]),
    ]
    assert chunks(rows) == []


def test_step_of_prompts_has_no_decode_rows():
    rows = state_rows([4], starts=[2], lengths=[3], draft_blocks=[()])
    assert decodes(rows) == []
    assert chunks(rows) == [(0, 3, 4, False)]
