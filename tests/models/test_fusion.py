"""Fused layers: which models are fused, their verification at load, and their memory use."""

import json
import logging
import random
import re

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import nn

from paged_backend.execution.batch import pack
from paged_backend.execution.runner import paged_logits
from paged_backend.loading import verification
from paged_backend.models import decoder as decoder_module
from paged_backend.models import fusion, linear
from paged_backend.models.attention import AttentionSpec, UnsupportedModel
from paged_backend.models.decoder import FusedDecoder, FusedExperts, FusedMlp
from paged_backend.models.linear import GroupedCopy
from paged_backend.scheduling.plan import Chunk, Plan
from paged_kernels.cpu import native
from tests.support.adapters import LORA, write_adapter_list
from tests.support.fake_decode_step import DeviceOperations
from tests.support.families import COMMON, FAMILIES, LATENT, is_fused
from tests.support.in_process import generate_with_transformers, running, save_tiny, tiny_assembly
from tests.support.packed_steps import BLOCK_SIZE, PackedSteps, random_prompts

FUSED = ["llama", "llama_mha_odd_head", "llama_mqa", "qwen2", "qwen2_window", "qwen3", "mistral_window", "smollm3"]


def create_model(config):
    """Create a model with random weights, biases and norms, all of them different."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() < 2), std=0.15)
    return model


def warnings_of(caplog):
    """Return the warnings of the engine."""
    return [one for one in caplog.records if one.levelno >= logging.WARNING and one.name.startswith("paged_llm")]


def verify_model(model, **options):
    return verification.verify_model(model, block_size=4, kv_dtype=torch.float32, **options)


FEWER = 15  # operations that a layer of a mixture of experts saves at least
BIASES = {"attention_bias": True, "mlp_bias": True}


CONFIGS = {name: FAMILIES[name] for name in FUSED} | {"biases": lambda: hf.LlamaConfig(**COMMON, **BIASES)}
MIXED = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Mixtures of experts, and the kinds of their layers' MLPs.
MIXTURES = {
    "mixtral": (FAMILIES["mixtral"], [FusedExperts] * 3),
    "qwen3_moe": (FAMILIES["qwen3_moe"], [FusedExperts] * 3),
    "gpt_oss": (FAMILIES["gpt_oss"], [FusedExperts] * 3),
    "deepseek_v2": (FAMILIES["deepseek_v2"], [FusedMlp, FusedExperts, FusedExperts]),
    "deepseek_v3": (FAMILIES["deepseek_v3"], [FusedMlp, FusedExperts, FusedExperts]),
    "deepseek_v3_yarn": (FAMILIES["deepseek_v3_yarn"], [FusedMlp, FusedExperts, FusedExperts]),
    "deepseek_v3_halves": (
        lambda: hf.DeepseekV3Config(**LATENT, q_lora_rank=24, n_group=2, topk_group=1, rope_interleave=False),
        [FusedMlp, FusedExperts, FusedExperts],
    ),
    "deepseek_v2_query_latents": (
        lambda: hf.DeepseekV2Config(**LATENT, q_lora_rank=24, topk_method="greedy", n_group=None, attention_bias=True),
        [FusedMlp, FusedExperts, FusedExperts],
    ),
    "qwen3_moe_dense_layer": (
        lambda: hf.Qwen3MoeConfig(**COMMON, **MIXED, mlp_only_layers=[1]),
        [FusedExperts, FusedMlp, FusedExperts],
    ),
    "qwen3_moe_sparse_step": (
        lambda: hf.Qwen3MoeConfig(**COMMON, **MIXED, decoder_sparse_step=2),
        [FusedMlp, FusedExperts, FusedMlp],
    ),
}


@pytest.mark.parametrize("name", [*CONFIGS, *MIXTURES])
def test_supported_families_are_fused(name, caplog):
    model = create_model(CONFIGS[name]() if name in CONFIGS else MIXTURES[name][0]())
    verify_model(model)
    assert is_fused(model)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_take_fewer_operations(name):
    config, mlps = MIXTURES[name]
    steps = PackedSteps(create_model(config()), 2, random.Random(0))
    sequences = [steps.sequence(prompt) for prompt in random_prompts(steps.rng, (9, 5))]
    chunks = tuple(Chunk(one, 0, one.pending, sampled_sequences=(one,)) for one in sequences)
    batch = pack(Plan(chunks), block_size=BLOCK_SIZE)

    def run():
        with DeviceOperations(None) as operations:
            logits = paged_logits(steps.model, batch, steps.kv)
        return logits, len(operations.names)

    decoder = FusedDecoder.of(steps.model)
    layers = decoder.layers
    assert [type(layer.mlp) for layer in layers] == mlps
    found, operations = run()
    del steps.model.model.forward
    assert not is_fused(steps.model)
    expected, unfused_operations = run()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert operations <= unfused_operations - FEWER * len(layers)


@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_with_grouped_weights(name, monkeypatch, caplog):
    """Their layers run one by one; a dense layer, too."""
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    model = create_model(MIXTURES[name][0]())
    verify_model(model)
    assert is_fused(model)
    decoder = FusedDecoder.of(model)
    assert decoder.native is None
    for layer, fused in zip(model.model.layers, decoder.layers, strict=True):
        assert all(isinstance(one.weight, GroupedCopy) for one in fused.projections)
        assert not any(parameter.numel() for parameter in layer.parameters() if parameter.dim() == 3)
    assert warnings_of(caplog) == []


@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
def test_linear_layers_inside_of_called_modules_are_packed(monkeypatch):
    """Shared experts are in a module that a fused layer calls."""
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    model = create_model(FAMILIES["deepseek_v3"]())
    verify_model(model)
    assert is_fused(model)
    shared = [f"layers.{layer}.mlp.shared_experts.{name}_proj" for layer in (1, 2) for name in ("gate", "up", "down")]
    assert all("forward" in vars(model.model.get_submodule(name)) for name in shared)


@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_with_grouped_weights_are_one_kernel_call(name, monkeypatch, caplog):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    model = create_model(CONFIGS[name]())
    verify_model(model)
    assert is_fused(model)
    assert FusedDecoder.of(model).native is not None
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("family", ["gemma3", "olmo2", "granite", "qwen2_moe", "cohere2"])
def test_other_families_are_not_fused(family):
    model = create_model(FAMILIES[family]())
    verify_model(model)
    assert not is_fused(model)


def storage(model):
    """Return the bytes of all parameter storages, each counted once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def test_fusing_keeps_memory_and_parameter_values():
    model = create_model(hf.LlamaConfig(**COMMON, **BIASES))
    nbytes, before = storage(model), {name: value.clone() for name, value in model.state_dict().items()}
    verify_model(model)
    assert is_fused(model)
    assert storage(model) == nbytes
    for layer, merged in zip(model.model.layers, FusedDecoder.of(model).layers, strict=True):
        own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        tensors = [(one.weight, one.bias, one.norm and one.norm.weight) for one in merged.projections]
        fused = [tensor for group in tensors for tensor in group if tensor is not None]
        assert {weight.untyped_storage().data_ptr() for weight in fused} == own
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_failed_verification_falls_back_to_unfused_layers(tmp_path, monkeypatch, caplog):
    model = save_tiny(FAMILIES["llama"](), tmp_path)
    swiglu = decoder_module.swiglu
    monkeypatch.setattr(decoder_module, "swiglu", lambda gate_up: swiglu(gate_up) * 1.5)
    assembly = tiny_assembly(tmp_path)
    assert not is_fused(assembly.loaded.model)
    assert "runs unmodified instead of a faster variant" in caplog.text
    assert "Rejected: fused: layer 0 (LlamaDecoderLayer) in float32: logits at position" in caplog.text
    with running(assembly) as engine:
        assert engine.generate([[5, 6, 7]], max_tokens=16) == [generate_with_transformers(model, [5, 6, 7], 16)]


@torch.no_grad()
def write_adapter(model, directory, names):
    """Save an adapter of some linear layers, and add it to their weights. PEFT takes shared experts for experts."""
    tensors = {}
    for name in names:
        weight = model.get_submodule(name).weight
        a, b = 0.3 * torch.randn(4, weight.shape[1]), 0.3 * torch.randn(weight.shape[0], 4)
        weight += 2 * b @ a
        tensors |= {f"base_model.model.{name}.lora_{letter}.weight": factor for letter, factor in (("A", a), ("B", b))}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(names)}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def test_adapters_of_modules_inside_of_a_mixture_of_experts(tmp_path):
    """Shared experts are linear layers of a module that a fused layer calls."""
    model = save_tiny(FAMILIES["deepseek_v3"](), tmp_path)
    prompt, names = [5, 6, 7, 8], [f"model.layers.2.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")]
    expected = [generate_with_transformers(model, prompt, 8)]
    write_adapter(model, tmp_path / "one", [*names, "model.layers.1.self_attn.q_a_proj"])
    expected.append(generate_with_transformers(model, prompt, 8))
    assert expected[0] != expected[1]
    adapters = write_adapter_list(tmp_path, {"one": tmp_path / "one"})
    assembly = tiny_assembly(tmp_path, adapters=adapters, **LORA)
    assert is_fused(assembly.loaded.model)
    with running(assembly) as engine:
        assert engine.generate([prompt], max_tokens=8) == expected[:1]
        assert engine.generate([prompt], max_tokens=8, lora_name="one") == expected[1:]


class Quantized(nn.Linear):
    """Stands for any subclass of Linear that computes something else."""


def add_hook(model):
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, arguments: None)


def other_class(model):
    model.model.layers[2].self_attn.k_proj.__class__ = Quantized


def other_forward(model):
    layer = model.model.layers[0]
    layer.input_layernorm.forward = layer.input_layernorm.forward


def other_dtype(model):
    model.model.layers[0].mlp.up_proj.to(torch.float64)


def only_one_bias(model):
    linear = model.model.layers[0].mlp.gate_proj
    linear.bias = nn.Parameter(torch.zeros(linear.out_features))


def other_module(model):
    model.model.layers[0].self_attn.adapter = nn.Identity()


def other_activation(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def other_final_norm(model):
    model.model.norm = nn.LayerNorm(64)


def other_layer_idx(model):
    model.model.layers[0].self_attn.layer_idx = 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_hook, "layer 1: mlp is a modified LlamaMLP, or has hooks"),
        (other_class, "layer 2: self_attn.k_proj is a modified Quantized"),
        (other_forward, "layer 0: input_layernorm is a modified LlamaRMSNorm, or has hooks"),
        (other_dtype, "layer 0: mlp.up_proj.weight is not a plain parameter in torch.float32 on cpu"),
        (only_one_bias, "layer 0: only some of the projections to be joined have a bias"),
        (other_module, "layer 0: its modules are .*adapter"),
        (other_activation, "layer 0: mlp.act_fn is a modified GELU"),
        (other_final_norm, "its final norm differs"),
        (other_layer_idx, "layer 0: its layer_idx is 1"),
    ],
)
def test_modified_model_is_not_fused(change, reason):
    model = create_model(FAMILIES["llama"]())
    change(model)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    obstacle = fusion.fuse(model, [AttentionSpec(0.25)] * 3, {})
    assert isinstance(obstacle, str)
    assert re.match(reason, obstacle), obstacle
    assert not is_fused(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def other_mixture(model):
    model.model.layers[1].mlp.__class__ = type("OtherBlock", (type(model.model.layers[1].mlp),), {})


def other_rotary_embedding(model):
    rotary = model.model.rotary_emb
    rotary.forward = rotary.forward


def other_parameter(model):
    model.model.layers[0].self_attn.sinks_of_keys = nn.Parameter(torch.zeros(4))


def float16_besides_norms(model):
    """As transformers loads gpt-oss in float16."""
    model.half()
    for name, module in model.named_modules():
        if "norm" in name:
            module.float()


def buffer_of_a_layer(model):
    model.model.layers[0].register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("mixtral", add_hook, "layer 1: mlp is a modified MixtralSparseMoeBlock, or has hooks"),
        ("mixtral", other_mixture, "layer 1: its modules are .*mlp.experts"),
        ("mixtral", other_class, "layer 2: self_attn.k_proj is a modified Quantized"),
        ("mixtral", other_module, "layer 0: its modules are .*adapter"),
        ("mixtral", buffer_of_a_layer, "layer 0: its parameters are"),
        ("deepseek_v2", other_rotary_embedding, "its rotary embedding differs"),
        ("deepseek_v3", lambda model: None, "layer 0: its attention does not store latents"),
        ("gpt_oss", float16_besides_norms, "layer 0: input_layernorm.weight is not a plain parameter in torch.float16"),
        ("gpt_oss", other_rotary_embedding, "its rotary embedding differs"),
        ("gpt_oss", other_parameter, "layer 0: its parameters are .*sinks_of_keys"),
    ],
)
def test_modified_mixture_of_experts_is_not_fused(family, change, reason):
    model = create_model(FAMILIES[family]())
    change(model)
    obstacle = fusion.fuse(model, [AttentionSpec(0.25)] * 3, {})
    assert isinstance(obstacle, str)
    assert re.match(reason, obstacle), obstacle
    assert not is_fused(model)


def test_modules_inside_of_a_mixture_of_experts_run_with_their_hooks():
    model, seen = create_model(FAMILIES["mixtral"]()), []
    model.model.layers[1].mlp.gate.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape))
    steps = PackedSteps(model, 1, random.Random(0))
    assert is_fused(model)
    seen.clear()
    steps.generate([[5, 6, 7]], 2, 4)
    assert seen[-1] == (1, 64)


def test_fused_decoder_rejects_unsupported_arguments():
    """`attend` rejects the same arguments: a mask, or a keyword that would change the result."""
    model = create_model(FAMILIES["llama"]())
    verify_model(model)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(UnsupportedModel, match="builds its own attention mask"):
        model.model(ids, ids, attention_mask=torch.zeros(1, 1, 1, 1), paged=None)
    with pytest.raises(UnsupportedModel, match="passes bias to attention"):
        model.model(ids, ids, paged=None, bias=ids)
