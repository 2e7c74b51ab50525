"""Packed and int8 weights of linear layers on a CPU: results, memory, verification."""

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from transformers import LongcatFlashConfig

from paged_backend.models import linear
from paged_backend.models.attention import UnsupportedModel
from paged_backend.models.linear import GroupedCopy, project
from paged_kernels.cpu import native
from tests.support.families import FAMILIES
from tests.support.in_process import generate_with_transformers, running, save_tiny, tiny_assembly
from tests.support.pairwise import mostly_nightly

PROMPTS = [[5] * length for length in (1, 2, 3, 5, 7, 11)]


compiled = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_packed_weights_match_linear(dtype, biased, monkeypatch):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    torch.manual_seed(0)
    weight, bias = torch.randn(70, 48).to(dtype), torch.randn(70).to(dtype) if biased else None
    copy = linear.WeightPacker()(weight)
    assert isinstance(copy, linear.GroupedCopy)
    for shape in ((1, 48), (1, 3, 48), (300, 48)):
        x = torch.randn(shape).to(dtype)
        y = project(x, copy, bias)
        assert y.dtype == dtype
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(y, exact.to(dtype))


def test_weights_that_the_kernels_do_not_multiply_stay(monkeypatch):
    pack = linear.WeightPacker()
    for weight in (torch.ones(256, 256, dtype=torch.float64), torch.ones(256, 255)):
        assert pack(weight) is weight
    monkeypatch.setattr(native, "levels", lambda: ())
    weight = torch.ones(256, 256)
    assert pack(weight) is weight
    assert not pack.changed


@pytest.fixture
def log_lines(caplog):
    caplog.set_level(logging.INFO, "paged_llm")
    return caplog


@compiled
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_fully_replaced_weights_are_freed(family, tied, tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    config = FAMILIES[family]()
    config.tie_word_embeddings = tied
    model = save_tiny(config, tmp_path)
    assembly = tiny_assembly(tmp_path)
    parameters = assembly.loaded.model.named_parameters()
    remaining = {name for name, parameter in parameters if parameter.dim() == 2 and parameter.numel()}
    assert remaining == {"model.embed_tokens.weight"}
    with running(assembly) as engine:
        assert engine.generate(PROMPTS, max_tokens=12) == [
            generate_with_transformers(model, prompt, 12) for prompt in PROMPTS
        ]


@compiled
@pytest.mark.parametrize(
    "family", mostly_nightly(FAMILIES, default=["qwen2", "olmo2", "gpt2", "phi3", "mixtral", "deepseek_v2"])
)
def test_every_family_matches_generate_with_grouped_weights(family, tmp_path, monkeypatch, log_lines):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    model = save_tiny(FAMILIES[family](), tmp_path)
    assembly = tiny_assembly(tmp_path)
    assert "with packed weights" in log_lines.text
    expected = [generate_with_transformers(model, prompt, 12) for prompt in PROMPTS]
    with running(assembly) as engine:
        assert engine.generate(PROMPTS, max_tokens=12) == expected
        assert [engine.generate([prompt], max_tokens=12)[0] for prompt in PROMPTS] == expected


@compiled
@pytest.mark.parametrize("quantized", [False, True])
def test_weights_read_outside_their_layers_are_kept(quantized, tmp_path, monkeypatch, log_lines):
    """The router of LongCat is a linear layer that is never called; the model reads its weight."""
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    config = LongcatFlashConfig(
        vocab_size=320, hidden_size=64, num_attention_heads=4, max_position_embeddings=256, num_layers=1,
        ffn_hidden_size=96, expert_ffn_hidden_size=16, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=8, zero_expert_num=4, moe_topk=2, head_dim=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = save_tiny(config, tmp_path)
    assembly = tiny_assembly(tmp_path, **{"quantization": "int8"} if quantized else {})
    assert "LongcatFlashForCausalLM keeps the weights beside their copies" in log_lines.text
    with running(assembly) as engine:
        tokens = engine.generate(PROMPTS, max_tokens=8)
    assert quantized or tokens == [generate_with_transformers(model, prompt, 8) for prompt in PROMPTS]


@compiled
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_packed_weights_that_fail_verification_are_not_used(family, tmp_path, monkeypatch, log_lines):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    pack = linear.pack_linear
    monkeypatch.setattr(linear, "pack_linear", lambda weight: pack(1.5 * weight))
    model = save_tiny(FAMILIES[family](), tmp_path)
    assembly = tiny_assembly(tmp_path)
    assert re.search("with packed weights: layer 0 .* in float32: logits at position", log_lines.text)
    with running(assembly) as engine:
        assert engine.generate(PROMPTS[:1], max_tokens=12) == [generate_with_transformers(model, PROMPTS[0], 12)]


@compiled
def test_copies_stay_within_memory_budget(tiny, monkeypatch, log_lines):
    head = 320 * 64 * 4
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(linear, "available_memory", lambda: 2 * head - 4)
    model = tiny_assembly(tiny[0]).loaded.model
    assert "a weight of shape [320, 64] is not packed: its faster copy" in log_lines.text
    assert "forward" not in vars(model.lm_head) or not isinstance(model.lm_head.forward.keywords["weight"], GroupedCopy)
    layer = model.model.forward.layers[0]
    assert isinstance(layer.attention.qkv.weight, GroupedCopy)
    weights = [one.weight for fused in model.model.forward.layers for one in fused.projections]
    assert 0 < sum(weight.packed.groups.nbytes for weight in weights if isinstance(weight, GroupedCopy)) < head


@compiled
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(("family", "form"), [("qwen2", "fused"), ("olmo2", "unmodified")])
def test_quantized_model_frees_its_own_weights(family, form, quantization, tmp_path, monkeypatch, log_lines):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    model = save_tiny(FAMILIES[family](), tmp_path)
    assembly = tiny_assembly(tmp_path, quantization=quantization)
    assert f"runs {form}, with {quantization} weights" in log_lines.text
    served = assembly.loaded.model
    sizes = {name: weight.numel() for name, weight in served.named_parameters() if "_proj.weight" in name}
    assert len(sizes) == 7 * len(served.model.layers)
    assert not any(sizes.values())
    assert torch.equal(served.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert served.lm_head.forward.keywords["weight"].packed.kind == "int8"
    with running(assembly) as engine:
        batched = engine.generate(PROMPTS, max_tokens=8)
        assert [engine.generate([prompt], max_tokens=8)[0] for prompt in PROMPTS] == batched
    for prompt, tokens in zip(PROMPTS, batched, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert (logits > logits.gather(1, torch.tensor(tokens)[:, None])).sum(1).max() < 32  # of 320


@compiled
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_number_of_quantized_weights_is_logged(quantization, tiny, monkeypatch, log_lines):
    """In each of three layers, two of four fused weights are large enough, and so is the output layer's."""
    monkeypatch.setattr(linear, "MIN_ELEMENTS", tiny[1].model.layers[0].mlp.down_proj.weight.numel() + 1)
    assembly = tiny_assembly(tiny[0], quantization=quantization)
    assert f"7 of 13 weights are rounded for {quantization}; those with less than 6145 elements stay" in log_lines.text
    assert f"with {quantization} weights" in log_lines.text
    assert assembly.loaded.spec.weight_format == quantization


@compiled
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_without_large_weights_is_logged(quantization, tiny, log_lines):
    assembly = tiny_assembly(tiny[0], quantization=quantization)
    assert re.search(rf'quantization="{quantization}" has no effect: .* less than 65536 elements', log_lines.text)
    assert f"with {quantization} weights" not in log_lines.text
    assert assembly.loaded.spec.weight_format is None


@compiled
@pytest.mark.parametrize(("dtype", "rounded"), [("float32", False), ("bfloat16", True)])
def test_activations_of_16_bits_are_rounded_for_int8_weights(tiny, dtype, rounded, monkeypatch):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    assembly = tiny_assembly(tiny[0], dtype=dtype, quantization="int8", quantized_activations="auto")
    layers = assembly.loaded.model.model.forward.layers
    assert {one.weight.packed.int8_rows for layer in layers for one in layer.projections} == {rounded}


def test_quantized_activations_without_quantized_weights_are_logged(tiny, caplog):
    tiny_assembly(tiny[0], quantized_activations="int8")
    assert 'quantized_activations="int8" has no effect: no weights of' in caplog.text


@compiled
def test_model_degraded_by_int8_weights_is_rejected(tiny, monkeypatch):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    quantize = linear.quantize
    monkeypatch.setattr(linear, "quantize", lambda weight, *spec: quantize(3 * weight, *spec))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* logits at position"):
        tiny_assembly(tiny[0], quantization="int8")
