"""The variants of a model, from the fastest to the unmodified one."""

import weakref

import pytest
import torch
import transformers as hf

from paged_backend.models import linear
from paged_backend.models.attention import ATTENTION, AttentionSpec
from paged_backend.models.linear import WeightQuantizer
from paged_backend.models.model_variants import model_variants
from paged_backend.models.overrides import overridden, use
from paged_backend.models.quantization import QuantizationSpec
from paged_kernels.cpu import native
from tests.support.families import COMMON

SPECS = [AttentionSpec(scale=0.25)] * 3


def fusable(**changes):
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**COMMON | changes), dtype=torch.float32).eval()
    model.set_attn_implementation(ATTENTION)
    return model


def test_fused_model_has_fused_and_unmodified_variants(monkeypatch):
    """Packed copies are used in a variant of their own, before the one without."""
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    model, names = fusable(), []
    for variant in model_variants(model, {}, SPECS, quantizer=None):
        names.append(variant.name)
        assert bool(variant.unused) == variant.name.endswith("packed weights")
        assert bool(variant.overrides) == (variant.name != "unmodified")
    assert names == ["fused, with packed weights", "fused", "unmodified, with packed weights", "unmodified"]


def test_model_of_another_family_is_not_fused():
    model = hf.AutoModelForCausalLM.from_config(hf.GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2))
    *_, variant = model_variants(model, {}, [AttentionSpec(scale=0.25)], quantizer=None)
    assert (variant.name, variant.obstacle) == ("unmodified", "GPT2LMHeadModel is not a supported family")


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_weights_follow_a_variant_that_is_only_verified(bits, monkeypatch):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    model = fusable()
    before = {name: one.clone() for name, one in model.named_parameters()}
    quantizer = WeightQuantizer(QuantizationSpec(bits, 32, int8_rows=False), model)
    plain, variant = model_variants(model, {}, SPECS, quantizer=quantizer)
    assert (plain.name, plain.is_intermediate, plain.weight_bits) == ("fused", True, None)
    assert (variant.name, variant.is_intermediate) == (f"fused, with int{bits} weights", False)
    assert variant.weight_bits == bits
    restore = variant.release_unused(model)
    assert not any(one.numel() for name, one in model.named_parameters() if name.endswith("_proj.weight"))
    restore()
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
def test_copies_of_weights_are_in_memory_for_one_variant_at_a_time(monkeypatch):
    """Also if the caller still has the variant before."""
    copies, used = [], []

    class Copy(linear.GroupedCopy):
        def __init__(self, weight):
            super().__init__(weight)
            assert all(copy() is None for copy, number in copies if number < len(used))
            copies.append((weakref.ref(self), len(used)))

    monkeypatch.setattr(linear, "GroupedCopy", Copy)
    model = fusable()
    for variant in model_variants(model, {}, SPECS, quantizer=None, batch_invariant=True):
        use(model, variant.overrides)
        used.append(variant)
    assert {number for _, number in copies} == {0, 1}


def test_model_runs_the_variant_that_is_used():
    """Neither what it has run before, nor what was run inside a context."""
    layer, other = torch.nn.Linear(2, 3), torch.nn.Linear(3, 4)
    model, x = torch.nn.Sequential(layer, other), torch.randn(1, 2)
    own, weight, bias = model(x), layer.weight, torch.nn.Parameter(torch.ones(4))
    use(model, {(layer, "forward"): lambda x: x.new_ones(1, 3), (layer, "extra"): 1})
    assert torch.equal(model(x), other(torch.ones(1, 3)))
    use(model, {(layer, "weight"): torch.nn.Parameter(torch.zeros(3, 2)), (other, "bias"): bias})
    assert not hasattr(layer, "extra")
    replaced = model(x)
    with overridden({(layer, "forward"): lambda x: x.new_zeros(1, 3)}):
        assert torch.equal(model(x)[0], bias)
    assert torch.equal(model(x), replaced)
    assert other.bias is bias
    use(model, {})
    assert torch.equal(model(x), own)
    assert layer.weight is weight


@pytest.mark.parametrize(
    ("intermediate_size", "key_value_heads", "is_fused", "expected"),
    [
        (96, 2, True, {(320, 64)}),  # the output layer; queries, keys and values would be 4 of 15
        (352, 2, True, {(320, 64), (128, 64)}),  # 4 of 39; with the layer after attention 6 of 39
        (352, 2, False, {(320, 64), (32, 64)}),  # keys and values alone
        (1024, 2, True, {(320, 64), (128, 64), (64, 64)}),  # 6 of 102
        (352, 4, True, {(320, 64)}),  # keys and values are as large as queries: 8 of 41
    ],
)
def test_int4_keeps_8_bits_in_the_smallest_layers(intermediate_size, key_value_heads, is_fused, expected, monkeypatch):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    quantize, bits_of = linear.quantize, {4: set(), 8: set()}

    def record(weight, bits, group_size):
        bits_of[bits].add(tuple(weight.shape))
        return quantize(weight, bits, group_size)

    monkeypatch.setattr(linear, "quantize", record)
    model = fusable(intermediate_size=intermediate_size, num_key_value_heads=key_value_heads)
    quantizer = WeightQuantizer(QuantizationSpec(4, 32, int8_rows=False), model)
    if is_fused:
        assert len(list(model_variants(model, {}, SPECS, quantizer=quantizer))) == 2
    else:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                quantizer(module.weight.data)
    assert bits_of[8] == expected
    assert (64, intermediate_size) in bits_of[4]
    assert not bits_of[4] & bits_of[8]
