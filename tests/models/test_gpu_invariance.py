"""Models whose linear layers multiply in one order on a GPU, on a CPU with the kernel's definition."""

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.testing import assert_close

from paged_backend.models import fusion, gpu_invariance, model_variants
from paged_backend.models.adapter_rows import adapter_rows
from paged_backend.models.attention import ATTENTION, AttentionSpec, UnsupportedModel
from paged_backend.models.gpu_invariance import InvariantWeight, install_invariant
from paged_backend.models.lora import InvariantFactors, StackedFactors
from paged_backend.models.peft_files import Factors
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
    for layer in model.model.forward.layers:
        assert all(isinstance(one.weight, InvariantWeight) for one in layer.projections)
    hidden = torch.randn(1, 3, COMMON["hidden_size"])
    assert_close(model.lm_head(hidden), hidden @ weight.T)
    assert products == [3]
    expected = fused.decoder.layers[0].attention.qkv(hidden[0])
    assert_close(model.model.forward.layers[0].attention.qkv(hidden[0]), expected)
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


def test_a_model_on_a_gpu_has_no_other_variant(monkeypatch):
    model, fused = make(hf.LlamaConfig)
    monkeypatch.setattr(model_variants, "fuse", lambda *arguments: fused)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    (variant,) = model_variants.model_variants(model, SPECS, None, batch_invariant=True)
    assert variant.name == "fused, with one order of sums for any number of rows"
    assert all(isinstance(one.weight, InvariantWeight) for one in model.model.forward.layers[0].projections)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_of_an_adapter_does_not_depend_on_the_others(dtype):
    """Rows of three adapters and of none, in one step and alone."""
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(size, generator=generator).to(dtype)

    slots, rank, inputs, outputs = 4, 3, 40, 24
    stack, plain = (
        kind(torch.zeros(slots, rank, inputs, dtype=dtype), torch.zeros(slots, rank, outputs, dtype=dtype))
        for kind in (InvariantFactors, StackedFactors)
    )
    for slot in (0, 1, 3):
        factors = Factors(random(rank, inputs), random(outputs, rank))
        stack.load_slot(slot, factors)
        plain.load_slot(slot, factors)
    x, y = random(7, inputs), random(7, outputs)
    y[:, 0] = -0.0
    owners = np.array([0, 3, -1, 1, 3, 0, -1])

    def add(factors, rows):
        result = y[rows].clone()
        factors.add(result, x[rows], adapter_rows(owners[rows]))
        return result

    together = add(stack, np.arange(7))
    assert_close(together, add(plain, np.arange(7)), rtol=0.05, atol=0.1)
    for row in range(7):
        alone = add(stack, np.array([row]))
        assert torch.equal(alone.view(torch.uint8), together[row : row + 1].contiguous().view(torch.uint8)), row
