"""One forward pass over a packed batch gives the logits of the model itself."""

import pytest
import torch

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.execution.batch import pack
from paged_backend.execution.forward import hidden_size, paged_logits, record_hidden_states
from paged_backend.scheduling.plan import StepResult
from tests.support.in_process import tiny_assembly

PROMPTS = [list(range(5, 15)), [7, 8, 9]]


@pytest.fixture(scope="module")
def assembly(tiny):
    return tiny_assembly(tiny[0], device="cpu")


def test_logits_of_sampled_rows_match_the_model(tiny, assembly):
    """A chunk that ends inside a prompt has none."""
    scheduler, model = assembly.scheduler, assembly.loaded.model
    for key, prompt in enumerate(PROMPTS):
        scheduler.add(GenerateRequest(key, tuple(prompt), SamplingParams(max_tokens=2), 0, frozenset()))
    tokens = [[*prompt] for prompt in PROMPTS]
    for _ in range(2):  # the prompts, then one token each
        plan = scheduler.schedule()
        logits = paged_logits(model, pack(plan, block_size=4), assembly.runner.kv)
        with torch.inference_mode():
            expected = torch.stack([tiny[1](torch.tensor([one])).logits[0, -1] for one in tokens])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        sampled = [3, 4]
        scheduler.commit(plan, StepResult.of_tokens(sampled))
        for one, token in zip(tokens, sampled, strict=True):
            one.append(token)


def test_model_that_projects_every_row_gives_the_same_logits(assembly, monkeypatch):
    scheduler, model = assembly.scheduler, assembly.loaded.model
    scheduler.add(GenerateRequest(9, tuple(PROMPTS[0]), SamplingParams(max_tokens=1), 0, frozenset()))
    plan = scheduler.schedule()
    batch = pack(plan, block_size=4)
    expected = paged_logits(model, batch, assembly.runner.kv)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, logits_to_keep, **rest: forward(*args, **rest))
    torch.testing.assert_close(paged_logits(model, batch, assembly.runner.kv), expected)
    assert len(expected) == 1
    scheduler.commit(plan, StepResult.of_tokens([3]))


def test_states_are_those_before_the_head_and_recorded_inside_the_context_only(tiny):
    model, ids = tiny[1], torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        with record_hidden_states(model) as states:
            logits = model(ids).logits
        model(ids)
        assert len(states) == 1
        assert torch.equal(model.lm_head(states[0]), logits)


def test_size_is_measured(tiny):
    assert hidden_size(tiny[1]) == 64


def test_model_without_a_head_has_no_hidden_size(tiny):
    assert hidden_size(tiny[1].base_model) is None


def test_model_with_other_hidden_states_has_no_hidden_size(tiny, monkeypatch):
    """Its decoder returns two states per token."""
    decoder = tiny[1].base_model
    hook = decoder.register_forward_hook(lambda module, inputs, output: type(output)(output[0].repeat(1, 2, 1)))
    try:
        assert hidden_size(tiny[1]) is None
    finally:
        hook.remove()
