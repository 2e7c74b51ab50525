"""Checkpoints in quantized formats: the tokens of the same weights in float32, and what stays quantized."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from paged_backend.models.linear import GroupedCopy, JoinedWeight, PermutedWeight
from paged_kernels.cpu import native
from tests.support.families import FAMILIES
from tests.support.gguf import CONFIG
from tests.support.in_process import generate_with_transformers, running, tiny_assembly
from tests.support.quantized_checkpoints import CHECKPOINTS, write_checkpoint

needs_kernels = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
PROMPT = list(range(1, 30))


def expected_tokens(reference):
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32, attn_implementation="eager")
    return generate_with_transformers(model, PROMPT, 12)


def packed_bytes(weight):
    """Return the bytes of the packed codes of a weight of a fused layer."""
    if isinstance(weight, JoinedWeight):
        return sum(packed_bytes(part) for part in weight.parts)
    weight = weight.weight if isinstance(weight, PermutedWeight) else weight
    assert isinstance(weight, GroupedCopy)
    return weight.packed.groups.nbytes


@needs_kernels
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_stay_quantized(name, tmp_path, caplog):
    caplog.set_level("INFO", "paged_llm")
    reference = write_checkpoint(tmp_path / "model", CONFIG, name)
    assembly = tiny_assembly(tmp_path / "model")
    model = assembly.loaded.model
    assert "all 14 quantized weights stay quantized" in caplog.text
    with running(assembly) as engine:
        assert engine.generate([PROMPT], max_tokens=12)[0] == expected_tokens(reference)
    bits = 4 if re.match(r"awq|gptq-4|gptq-desc|w4", name) else 8
    layer = model.model.layers[0]
    sizes = [weight.numel() for weight in AutoModelForCausalLM.from_config(CONFIG).model.layers[0].parameters()]
    elements = sum(size for size in sizes if size > 64)
    assert sum(packed_bytes(weight) for weight in layer.forward.weights) == elements * bits // 8
    assert not any(parameter.numel() > 64 for parameter in layer.parameters())


EXPERTS = [  # architecture, format, weights that stay quantized
    ("gpt_oss", "mxfp4", 6),
    ("qwen3_moe", "fp8-deepseek", 3 * (4 + 3 * 4)),
    ("mixtral", "awq-32", 3 * (4 + 3 * 4)),
    ("qwen3_moe", "w4a16-channel", 3 * (4 + 3 * 4)),
]


@needs_kernels
@pytest.mark.parametrize(("family", "name", "number"), EXPERTS)
def test_experts_stay_quantized(family, name, number, tmp_path, caplog):
    caplog.set_level("INFO", "paged_llm")
    reference = write_checkpoint(tmp_path / "model", FAMILIES[family](), name)
    assembly = tiny_assembly(tmp_path / "model")
    assert f"all {number} quantized weights stay quantized" in caplog.text
    experts = [parameter for parameter in assembly.loaded.model.parameters() if parameter.dim() == 3]
    assert not experts
    with running(assembly) as engine:
        assert engine.generate([PROMPT], max_tokens=12)[0] == expected_tokens(reference)
