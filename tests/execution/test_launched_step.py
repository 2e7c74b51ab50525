"""Results of launched steps: accepted draft tokens, and outputs that are not finite."""

import pytest
import torch

from paged_backend.api.errors import ErrorCode
from paged_backend.execution.batch import DraftCheck
from paged_backend.execution.launched_step import LaunchedStep
from paged_backend.sampling import logprobs
from paged_backend.sampling.outputs import OutputRows, OutputValues, Source

LOGITS = torch.tensor([[0.0, 1.0, 2.0]])


def launched(tokens, **parts):
    empty = dict.fromkeys("beams draft_ids hidden arrived".split())
    empty |= dict.fromkeys("outputs checks hidden_chunks failed_rows".split(), ())
    return LaunchedStep(**empty | parts | {"tokens": torch.tensor(tokens, dtype=torch.int64)})


def scored(source, owners, tokens):
    """Return the log probabilities of one token per row."""
    counts = (0,) * len(owners)
    tensors = logprobs.compute(LOGITS.expand(len(owners), -1), torch.tensor(tokens)[:, None], counts)
    return OutputValues(OutputRows("logprobs", source, torch.tensor(owners), counts, owners), 1, tensors)


def test_each_row_is_a_sequence_without_draft_tokens():
    assert launched([4, 5]).result().tokens == [[4], [5]]
    assert launched([]).result().tokens == []


@pytest.mark.parametrize(
    ("sampled", "accepted"), [([8, 9, 1], [8, 9, 1]), ([8, 7, 1], [8, 7]), ([3, 9, 1], [3])], ids=str
)
def test_draft_tokens_are_accepted_up_to_the_first_difference(sampled, accepted):
    """The sequences before and after have no draft tokens."""
    step = launched([4, *sampled, 5], checks=(DraftCheck(1, 1, (8, 9)),))
    assert step.result().tokens == [[4], accepted, [5]]


def test_draft_tokens_of_a_draft_model_are_read_from_the_batch():
    step = launched([8, 9, 1], checks=(DraftCheck(0, 1, (-1, -1)),), draft_ids=torch.tensor([7, 8, 2]))
    assert step.result().tokens == [[8, 9]]


def test_log_probabilities_of_rejected_draft_tokens_are_dropped():
    step = launched(
        [1, 2, 0], checks=(DraftCheck(0, 1, (0, 0)),), outputs=(scored(Source.SAMPLED, (0, 1, 2), [1, 2, 0]),)
    )
    result = step.result()
    assert result.tokens == [[1]]
    assert [entries[0].token for entries in result.values["logprobs"][0]] == [1]


def test_fingerprints_of_rejected_draft_tokens_are_dropped():
    values = torch.arange(5)[:, None].expand(-1, 2).contiguous()
    sampled, prompt = (
        OutputValues(OutputRows("fingerprints", source, torch.tensor(owners), (0,) * len(owners), owners), 1, (found,))
        for source, owners, found in ((Source.SAMPLED, (0, 1, 2, 3), values[:4]), (Source.PROMPT, (4,), values[4:]))
    )
    result = launched([5, 1, 2, 0], checks=(DraftCheck(1, 1, (1, 0)),), outputs=(sampled, prompt)).result()
    names = [row.numpy().tobytes() for row in values]
    assert result.tokens == [[5], [1, 2]]
    assert result.values == {"fingerprints": {0: [names[0]], 1: names[1:3]}}
    assert result.prompt_values == {"fingerprints": {4: [names[4]]}}


def test_sequence_without_a_finite_token_gets_an_error():
    result = launched([4, -1, 5], failed_rows=((2, "no token is allowed"),)).result()
    assert {index: error.code for index, error in result.errors.items()} == {
        1: ErrorCode.INTERNAL,
        2: ErrorCode.INVALID_ARGUMENT,
    }
    assert "not finite" in str(result.errors[1])


def test_prompt_results_belong_to_their_chunks():
    """Chunks 1 and 3 have one and two scored rows. The hidden state of chunk 4 is not finite."""
    hidden = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
    step = launched([], outputs=(scored(Source.PROMPT, (1, 3, 3), [2, 1, 0]),), hidden=hidden, hidden_chunks=(2, 4))
    result = step.result()
    assert {chunk: [row[0].token for row in rows] for chunk, rows in result.prompt_values["logprobs"].items()} == {
        1: [2],
        3: [1, 0],
    }
    assert list(result.hidden_states[2]) == [1.0, 2.0]
    assert list(result.prompt_errors) == [4]
