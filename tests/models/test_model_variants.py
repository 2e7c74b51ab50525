"""The variants of a model, from the fastest to the unmodified one."""

import pytest
import torch
import transformers as hf

from paged_backend.models import linear
from paged_backend.models.attention import ATTENTION, AttentionSpec
from paged_backend.models.linear import WeightQuantizer
from paged_backend.models.model_variants import model_variants
from paged_backend.models.quantization import QuantizationSpec
from tests.support.families import COMMON

SPECS = [AttentionSpec(scale=0.25)] * 3


def fusable():
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**COMMON), dtype=torch.float32).eval()
    model.set_attn_implementation(ATTENTION)
    return model


def layers(model):
    """Return the modules whose forward function is replaced."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_fused_model_has_fused_and_unmodified_variants(monkeypatch):
    """Packed copies are used in a variant of their own, before the one without."""
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(linear, "measure", lambda *arguments: [{"plain": 1.0, "groups": 0.5}] * len(linear.ROWS))
    model, names = fusable(), []
    for variant in model_variants(model, SPECS, quantizer=None):
        names.append(variant.name)
        assert bool(variant.unused) == variant.name.endswith("packed weights")
    assert names == ["fused, with packed weights", "fused", "unmodified, with packed weights", "unmodified"]
    assert layers(model) == []


def test_model_of_another_family_is_not_fused():
    model = hf.AutoModelForCausalLM.from_config(hf.GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2))
    *_, variant = model_variants(model, [AttentionSpec(scale=0.25)], quantizer=None)
    assert (variant.name, variant.obstacle) == ("unmodified", "GPT2LMHeadModel is not a supported family")


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_weights_follow_a_variant_that_is_only_verified(bits, monkeypatch):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    model = fusable()
    before = {name: one.clone() for name, one in model.named_parameters()}
    quantizer = WeightQuantizer(QuantizationSpec(bits, 32, int8_rows=False), model)
    plain, variant = model_variants(model, SPECS, quantizer=quantizer)
    assert (plain.name, plain.is_intermediate, plain.weight_bits) == ("fused", True, None)
    assert (variant.name, variant.is_intermediate) == (f"fused, with int{bits} weights", False)
    assert variant.weight_bits == bits
    restore = variant.release_unused(model)
    assert not any(one.numel() for name, one in model.named_parameters() if name.endswith("_proj.weight"))
    restore()
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


@pytest.mark.parametrize("quantized", [False, True])
def test_last_variant_stays_installed(quantized):
    model = fusable()
    quantizer = WeightQuantizer(QuantizationSpec(8, None, int8_rows=False), model) if quantized else None
    for variant in model_variants(model, SPECS, quantizer=quantizer):
        last = variant.name
    assert bool(layers(model)) == (last != "unmodified") == quantized
