"""Optional outputs: what is declared is computed and sent, and only for the rows that request it."""

import torch

from paged_backend.api.token_outputs import TOKEN_OUTPUTS
from paged_backend.sampling.outputs import (
    COMPUTATIONS,
    MAX_PROMPT_ROWS,
    Source,
    compute_outputs,
    request_prompt_rows,
    request_rows,
)
from paged_backend.server.wire.tensors import OUTPUTS, RETURNED


def test_every_declared_output_is_computed_and_sent():
    assert COMPUTATIONS.keys() == TOKEN_OUTPUTS.keys()
    sent = TOKEN_OUTPUTS.keys() - {"fingerprints"}  # the receipt has their digest
    assert sent <= RETURNED and sent <= OUTPUTS.keys()


def test_outputs_are_computed_for_the_rows_that_request_them():
    logits = torch.arange(9.0).expand(4, -1)
    requested = request_rows(Source.SAMPLED, [{}, {"logprobs": 2}, {"fingerprints": 0}, {"logprobs": 0}])
    assert {one.name: one.owners for one in requested} == {"logprobs": (1, 3), "fingerprints": (2,)}
    computed = compute_outputs(requested, logits, torch.arange(4), None, logits)
    values = {output.of.name: dict(output.by_row()) for output in computed}
    tokens = {row: [entry.token for entry in value] for row, (value,) in values["logprobs"].items()}
    assert tokens == {1: [1, 8, 7], 3: [3]}
    assert list(values["fingerprints"]) == [2]
    assert request_rows(Source.SAMPLED, [{}, {}]) == ()


def test_prompt_rows_are_computed_some_at_a_time():
    count = 2 * MAX_PROMPT_ROWS + 1
    logits = torch.randn(count, 9)
    parts = request_prompt_rows([{"logprobs": 0}] * count, [7] * count, torch.arange(count), [1] * count)
    assert [len(one.owners) for one in parts] == [MAX_PROMPT_ROWS, MAX_PROMPT_ROWS, 1]
    found = [
        value for one in compute_outputs(parts, logits[:0], torch.zeros(0), None, logits) for value in one.by_row()
    ]
    expected = logits.log_softmax(-1)[:, 1]
    assert [chunk for chunk, _ in found] == [7] * count
    torch.testing.assert_close(torch.tensor([value[0].logprob for _, (value,) in found]), expected)
