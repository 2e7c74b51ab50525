"""Batch invariance: conversion of models, and the checks at load. The kernel of a GPU is computed on a CPU."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

from paged_backend.loading import verification
from paged_backend.models import batch_invariance, fusion, model_variants
from paged_backend.models.attention import ATTENTION, AttentionSpec, UnsupportedModel
from paged_backend.models.batch_invariance import (
    InvariantWeight,
    check_invariance,
    convert_on_gpu,
    convert_parameters,
    reject_products,
)
from paged_backend.models.linear import GroupedCopy, WeightPacker
from paged_backend.models.lora import InvariantFactors, StackedFactors, adapter_rows
from paged_backend.models.overrides import overridden, use
from paged_backend.models.peft_files import Factors
from tests.support.families import COMMON, DEFAULT_FAMILIES, FAMILIES
from tests.support.in_process import tiny_assembly
from tests.support.pairwise import mostly_nightly
from tests.support.tiny_family import TinyFamily

SPECS = [AttentionSpec(scale=0.25)] * COMMON["num_hidden_layers"]


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 32, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x):
        in_type = F.linear(x, self.weight)
        return in_type, F.linear(x.float(), self.weight.float()), F.linear(x.float(), self.weight.type(torch.float32))


@pytest.mark.parametrize("rows", [1, 30])
def test_routers_multiply_by_packed_weights_in_each_type(rows):
    router, converted = Router(), []
    x = torch.randn(rows, 32, dtype=torch.bfloat16)
    expected = router(x)

    def convert(weight):
        converted.append(weight.dtype)
        return GroupedCopy(weight)

    with overridden(convert_parameters(router, {}, convert)), reject_products(router):
        for _ in range(2):
            found = router(x)
    assert converted == [torch.bfloat16, torch.float32]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-1, rtol=2e-2)
        assert one.dtype == other.dtype and type(one) is torch.Tensor
    assert all(torch.equal(one, other) for one, other in zip(router(x), expected, strict=True))


def test_layers_of_gpt2_multiply_by_packed_weights():
    layer, x = Conv1D(20, 32), torch.randn(5, 32)
    nn.init.normal_(layer.bias)
    with torch.inference_mode():
        expected = layer(x)
        packed = convert_parameters(layer, {}, WeightPacker(batch_invariant=True))
        with overridden(packed), reject_products(layer):
            torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)
        computed = "batch_invariant=true: PyTorch computes addmm in it"
        with pytest.raises(UnsupportedModel, match=computed), reject_products(layer):
            layer(x)


def test_logits_that_depend_on_the_number_of_rows_are_rejected():
    def run(dtype, most):
        return {(0, 5): torch.tensor([1.0 + (most == 1) * 1e-6])}

    check_invariance(nn.Module(), lambda dtype, most: {0: torch.ones(3)}, {torch.float32})
    with pytest.raises(UnsupportedModel, match="its logits depend on the number of tokens in a step"):
        check_invariance(nn.Module(), run, {torch.float32})


def test_model_that_fails_is_rejected_by_name(tmp_path, monkeypatch):
    family = TinyFamily.create("gpt2", tmp_path)
    family.assembly(dtype="bfloat16", batch_invariant=True)
    monkeypatch.setattr(batch_invariance, "Conv1D", nn.Identity)  # leaves the layers of GPT-2 to PyTorch
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel cannot be served .* PyTorch computes addmm in it"):
        family.assembly(dtype="bfloat16", batch_invariant=True)


def test_without_compiled_kernels_it_is_rejected(tiny, monkeypatch):
    monkeypatch.setattr("paged_kernels.cpu.native.levels", lambda: ())
    with pytest.raises(verification.UnsupportedModel.__base__, match="batch_invariant=true: requires the CPU kernels"):
        tiny_assembly(tiny[0], batch_invariant=True)


@pytest.mark.parametrize(
    "name", mostly_nightly(sorted(FAMILIES.keys() - {"mixtral", "qwen2_moe"}), default=DEFAULT_FAMILIES)
)
def test_families_can_be_served(name, tmp_path):
    """Mixtral and Qwen2-MoE are as tiny random models too sensitive to rounding to be verified in bfloat16."""
    TinyFamily.create(name, tmp_path).assembly(dtype="bfloat16", batch_invariant=True)


def make(config, **changes):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config(**COMMON | changes), dtype=torch.float32).eval()
    model.set_attn_implementation(ATTENTION)
    return model, fusion.fuse(model, SPECS, {})


@pytest.fixture
def products(monkeypatch):
    """The numbers of rows of all products."""
    seen, multiply = [], batch_invariance.invariant_linear

    def spied(x, *arguments):
        seen.append(len(x))
        return multiply(x, *arguments)

    monkeypatch.setattr(batch_invariance, "invariant_linear", spied)
    return seen


def test_every_linear_layer_is_replaced(products):
    model, fused = make(hf.LlamaConfig)
    weight = model.lm_head.weight.data
    use(model, convert_on_gpu(model, fused))
    for layer in model.model.forward.layers:
        assert all(isinstance(one.weight, InvariantWeight) for one in layer.projections)
    hidden = torch.randn(1, 3, COMMON["hidden_size"])
    assert_close(model.lm_head(hidden), hidden @ weight.T)
    assert products == [3]
    expected = fused.layers[0].attention.qkv(hidden[0])
    assert_close(model.model.forward.layers[0].attention.qkv(hidden[0]), expected)
    assert products == [3, 3]


def test_classification_head_is_replaced(products):
    torch.manual_seed(0)
    model = hf.AutoModelForSequenceClassification.from_config(hf.LlamaConfig(**COMMON), dtype=torch.float32).eval()
    model.set_attn_implementation(ATTENTION)
    use(model, convert_on_gpu(model, fusion.fuse(model, SPECS, {})))
    model.score(torch.randn(2, COMMON["hidden_size"]))
    assert products == [2]


def test_models_with_other_modules_are_rejected():
    with pytest.raises(UnsupportedModel, match=r"batch_invariant=true.*GPU.*not fused.*GemmaModel"):
        convert_on_gpu(*make(hf.GemmaConfig, head_dim=16))
    with pytest.raises(UnsupportedModel, match=r"mixture of experts \(MixtralSparseMoeBlock\)"):
        convert_on_gpu(*make(hf.MixtralConfig))
    model, fused = make(hf.LlamaConfig)
    model.lm_head = nn.Sequential(nn.LayerNorm(COMMON["hidden_size"]), model.lm_head)
    with pytest.raises(UnsupportedModel, match="LayerNorm"):
        convert_on_gpu(model, fused)


def test_a_model_on_a_gpu_has_no_other_variant(monkeypatch):
    model, fused = make(hf.LlamaConfig)
    monkeypatch.setattr(model_variants, "fuse", lambda *arguments: fused)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    (variant,) = model_variants.model_variants(model, {}, SPECS, None, batch_invariant=True)
    assert variant.name == "fused, with one order of sums for any number of rows"
    decoder = variant.overrides[model.model, "forward"]
    assert all(isinstance(one.weight, InvariantWeight) for one in decoder.layers[0].projections)


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
