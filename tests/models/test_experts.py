"""Mixtures of experts with converted weights, against the experts of transformers."""

import logging

import pytest
import torch
import transformers as hf

from paged_backend.models import linear
from paged_backend.models.experts import convert_experts, expert_modules
from paged_backend.models.linear import GroupedCopy, WeightPacker
from paged_backend.models.overrides import overridden, use
from paged_kernels.cpu import native
from tests.support.families import COMMON, FAMILIES
from tests.support.in_process import generate_with_transformers, running, save_tiny, tiny_assembly

compiled = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
NEAR = {torch.float32: dict(rtol=1e-4, atol=1e-6), torch.bfloat16: dict(rtol=2e-2, atol=3e-2)}
PROMPTS = [[5] * length for length in (1, 2, 3, 5, 7, 11)]


@pytest.fixture(autouse=True)
def small_weights(monkeypatch):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)


def create(family, dtype=torch.float32):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def rows(count, dtype):
    """Return hidden states, the experts of each row, and their weights."""
    torch.manual_seed(count)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(count)])
    return torch.randn(count, 64).to(dtype), chosen, torch.rand(count, 2).to(dtype)


@compiled
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("family", MIXTURES)
@torch.inference_mode()
def test_experts_match_transformers(family, dtype):
    model = create(family, dtype)
    modules = list(expert_modules(model))
    assert len(modules) == 3
    for experts in modules:
        cases = [rows(count, dtype) for count in (1, 2, 40)]
        expected = [experts(*case) for case in cases]
        with overridden(convert_experts(experts, GroupedCopy)):
            for case, outputs in zip(cases, expected, strict=True):
                torch.testing.assert_close(experts(*case), outputs, **NEAR[dtype])


@compiled
@torch.inference_mode()
def test_a_row_does_not_depend_on_other_rows():
    experts = next(expert_modules(create("mixtral", torch.bfloat16)))
    use(experts, convert_experts(experts, GroupedCopy))
    hidden, chosen, weights = rows(40, torch.bfloat16)
    together = experts(hidden, chosen, weights)
    for index in range(40):
        alone = experts(hidden[index : index + 1], chosen[index : index + 1], weights[index : index + 1])
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("family", MIXTURES)
@torch.inference_mode()
def test_experts_whose_weights_are_not_all_grouped(family):
    """Each expert then uses the method of its weight."""
    experts = next(expert_modules(create(family)))
    cases = [rows(count, torch.float32) for count in (1, 40)]
    expected = [experts(*case) for case in cases]
    numbers = iter(range(100))

    def convert(weight):
        return weight if next(numbers) % 2 else lambda x, bias: torch.nn.functional.linear(x, weight, bias)

    use(experts, convert_experts(experts, convert))
    for case, outputs in zip(cases, expected, strict=True):
        torch.testing.assert_close(experts(*case), outputs, **NEAR[torch.float32])


@compiled
@pytest.mark.parametrize("family", MIXTURES)
def test_weights_of_experts_are_freed(family, tmp_path, caplog):
    caplog.set_level(logging.INFO, "paged_llm")
    model = save_tiny(FAMILIES[family](), tmp_path)
    assembly = tiny_assembly(tmp_path)
    served = assembly.loaded.model
    assert "with packed weights" in caplog.text
    left = {name: one.numel() for name, one in served.named_parameters() if one.numel() and one.dim() == 3}
    assert left == {}
    with running(assembly) as engine:
        assert engine.generate(PROMPTS, max_tokens=8) == [
            generate_with_transformers(model, prompt, 8) for prompt in PROMPTS
        ]


@compiled
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_experts_give_the_same_tokens_alone_and_together(quantization, tmp_path):
    save_tiny(FAMILIES["qwen3_moe"](), tmp_path)
    assembly = tiny_assembly(tmp_path, quantization=quantization)
    experts = next(module for module in assembly.loaded.model.modules() if hasattr(module, "gate_up_proj"))
    assert experts.gate_up_proj.numel() == 0
    with running(assembly) as engine:
        together = engine.generate(PROMPTS, max_tokens=8)
        assert [engine.generate([prompt], max_tokens=8)[0] for prompt in PROMPTS] == together


@compiled
def test_weights_beyond_the_memory_budget_stay(monkeypatch, caplog):
    model = create("mixtral")
    per_expert = next(expert_modules(model)).gate_up_proj[0].nbytes
    monkeypatch.setattr(linear, "available_memory", lambda: 2 * 5 * per_expert)
    packer = WeightPacker()
    case = rows(40, torch.float32)
    with torch.inference_mode():
        experts = next(expert_modules(model))
        expected = experts(*case)
        use(model, convert_experts(model, packer))
        torch.testing.assert_close(experts(*case), expected, **NEAR[torch.float32])
    assert 0 < len(packer.replaced) < 3 * 2 * 4
    warnings = [line for line in caplog.messages if "is not packed: its faster copy" in line]
    assert len(warnings) == len(set(warnings)) > 0  # one for each shape, not for each expert


def test_models_without_experts_have_none():
    assert list(expert_modules(hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**COMMON)))) == []
