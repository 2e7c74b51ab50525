"""Recording the last hidden states of a model."""

import torch

from paged_backend.models.hidden_states import hidden_size, record_hidden_states


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
