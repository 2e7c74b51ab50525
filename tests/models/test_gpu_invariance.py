"""Models whose linear layers multiply in one order on a GPU, on a CPU with the kernel's definition."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch.testing import assert_close

from paged_backend.models import fusion, gpu_invariance
from paged_backend.models.attention import ATTENTION, AttentionSpec, UnsupportedModel
from paged_backend.models.gpu_invariance import InvariantWeight, install_invariant
from tests.support.families import COMMON

SPECS = [AttentionSpec(scale=0.25)] * COMMON["num_hidden_layers"]


def make(config, **changes):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config(**COMMON | changes), dtype=torch.float32).eval()
    model.set_attn_implementation(ATTENTION)
    return model, fusion.fuse(model, SPECS)


@pytest.fixture
def products(monkeypatch):
    """The numbers of rows of all products."""
    seen, multiply = [], gpu_invariance.invariant_linear

    def spied(x, *arguments):
        seen.append(len(x))
        return multiply(x, *arguments)

    monkeypatch.setattr(gpu_invariance, "invariant_linear", spied)
    return seen


def test_every_linear_layer_is_replaced(products):
    model, fused = make(hf.LlamaConfig)
    weight = model.lm_head.weight.data
    install_invariant(model, fused)
    for layer in model.model.layers:
        assert all(isinstance(one.weight, InvariantWeight) for one in layer.forward.projections)
    hidden = torch.randn(1, 3, COMMON["hidden_size"])
    assert_close(model.lm_head(hidden), hidden @ weight.T)
    assert products == [3]
    expected = fused.layers[0].attention.qkv(hidden[0])
    assert_close(model.model.layers[0].forward.attention.qkv(hidden[0]), expected)
    assert products == [3, 3]


def test_classification_head_is_replaced(products):
    torch.manual_seed(0)
    model = hf.AutoModelForSequenceClassification.from_config(hf.LlamaConfig(**COMMON), dtype=torch.float32).eval()
    model.set_attn_implementation(ATTENTION)
    install_invariant(model, fusion.fuse(model, SPECS))
    model.score(torch.randn(2, COMMON["hidden_size"]))
    assert products == [2]


def test_models_with_other_modules_are_rejected():
    with pytest.raises(UnsupportedModel, match=r"batch_invariant=true.*GPU.*not fused.*GemmaModel"):
        install_invariant(*make(hf.GemmaConfig, head_dim=16))
    with pytest.raises(UnsupportedModel, match=r"mixture of experts \(MixtralSparseMoeBlock\)"):
        install_invariant(*make(hf.MixtralConfig))
    model, fused = make(hf.LlamaConfig)
    model.lm_head = nn.Sequential(nn.LayerNorm(COMMON["hidden_size"]), model.lm_head)
    with pytest.raises(UnsupportedModel, match="LayerNorm"):
        install_invariant(model, fused)
