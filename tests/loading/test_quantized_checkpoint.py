"""Checkpoints in quantized formats: the tokens of the same weights in float32, and what stays quantized."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from paged_backend.api.errors import ConfigError
from paged_backend.files import quantization_fields
from paged_backend.loading import stored_weights
from paged_backend.loading.quantized_checkpoint import check_method
from paged_backend.models.linear import GroupedCopy, JoinedWeight, PermutedWeight
from paged_kernels.cpu import native
from tests.support.adapters import LORA, generate_with, make_adapter, write_adapter_list
from tests.support.families import FAMILIES
from tests.support.gguf import CONFIG
from tests.support.in_process import generate_with_transformers, running, save_tiny, tiny_assembly
from tests.support.pairwise import mostly_nightly
from tests.support.quantized_checkpoints import CHECKPOINTS, edit_config, write_checkpoint

needs_kernels = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
PROMPT = list(range(1, 30))


def expected_tokens(reference):
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32, attn_implementation="eager")
    return generate_with_transformers(model, PROMPT, 12)


def packed_bytes(weight):
    """Return the bytes of the packed codes of a weight of a fused layer, without their scales."""
    if isinstance(weight, JoinedWeight):
        return sum(packed_bytes(part) for part in weight.parts)
    weight = weight.weight if isinstance(weight, PermutedWeight) else weight
    assert isinstance(weight, GroupedCopy)
    packed = weight.packed
    blocks = -(-packed.in_features // packed.block_inputs)
    headers = blocks * packed.out_features * (4 if packed.wide_scales else 2) * (1 + packed.has_mins)
    return packed.groups.nbytes - headers


@needs_kernels
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_stay_quantized(name, tmp_path, caplog):
    caplog.set_level("INFO", "paged_llm")
    reference = write_checkpoint(tmp_path / "model", CONFIG, name)
    assembly = tiny_assembly(tmp_path / "model")
    model = assembly.loaded.model
    assert "all 14 quantized weights stay quantized" in caplog.text
    assert f"Data types: weights {assembly.loaded.spec.weight_format} (activations float32)" in caplog.text
    with running(assembly) as engine:
        assert engine.generate([PROMPT], max_tokens=12)[0] == expected_tokens(reference)
    bits = 4 if re.match(r"awq|gptq-4|gptq-desc|w4", name) else 8
    layer = model.model.layers[0]
    sizes = [weight.numel() for weight in AutoModelForCausalLM.from_config(CONFIG).model.layers[0].parameters()]
    elements = sum(size for size in sizes if size > 64)
    assert sum(packed_bytes(one.weight) for one in model.model.forward.layers[0].projections) == elements * bits // 8
    assert not any(parameter.numel() > 64 for parameter in layer.parameters())


ACTIVATIONS = [  # option, dtype, whether they are rounded
    ("auto", "float32", False),
    ("auto", "bfloat16", True),
    ("none", "bfloat16", False),
    ("int8", "float32", True),
]


@needs_kernels
@pytest.mark.parametrize(("option", "dtype", "rounded"), ACTIVATIONS)
def test_activations_are_rounded(option, dtype, rounded, tmp_path, caplog):
    caplog.set_level("INFO", "paged_llm")
    write_checkpoint(tmp_path / "model", CONFIG, "awq-32")
    assembly = tiny_assembly(tmp_path / "model", dtype=dtype, quantized_activations=option)
    assert "all 14 quantized weights stay quantized" in caplog.text
    weights = [one.weight for layer in assembly.loaded.model.model.forward.layers for one in layer.projections]
    assert [weight.packed.int8_rows for weight in weights] == [rounded] * len(weights)


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


PARALLEL = ("gptq-desc_act", "awq-32", "w8a8", "w4a16-channel", "fp8-deepseek")


@needs_kernels
@pytest.mark.nightly
@pytest.mark.parametrize("name", PARALLEL)
def test_tensor_parallelism(name, tmp_path, caplog):
    caplog.set_level("INFO", "paged_llm")
    reference = write_checkpoint(tmp_path / "model", CONFIG, name)
    assembly = tiny_assembly(tmp_path / "model", tensor_parallel_size=2)
    if name == "gptq-desc_act":  # the layers whose inputs are split
        assert re.search(r"4 of 14 quantized weights are widened to float32, which takes .* MiB more", caplog.text)
        assert "o_proj.weight (its blocks are split by tensor parallelism)" in caplog.text
    else:
        assert "all 14 quantized weights stay quantized" in caplog.text
    with running(assembly) as engine:
        assert engine.generate([PROMPT], max_tokens=12)[0] == expected_tokens(reference)
    assembly.close()


@needs_kernels
@pytest.mark.nightly
def test_experts_of_tensor_parallel_models_are_widened(tmp_path, caplog):
    caplog.set_level("INFO", "paged_llm")
    reference = write_checkpoint(tmp_path / "model", FAMILIES["qwen3_moe"](), "w4a16-channel")
    assembly = tiny_assembly(tmp_path / "model", tensor_parallel_size=2)
    assert "36 of 48 quantized weights are widened to float32, which takes" in caplog.text
    with running(assembly) as engine:
        assert engine.generate([PROMPT], max_tokens=12)[0] == expected_tokens(reference)
    assembly.close()


@needs_kernels
@pytest.mark.parametrize(
    "name",
    mostly_nightly(
        ["awq-32", "gptq-desc_act", "gptq-desc_act-different", "w4a16", "w8a8", "fp8-deepseek"],
        default=["awq-32", "gptq-desc_act-different", "w8a8", "fp8-deepseek"],
    ),
)
def test_adapters(name, tmp_path, caplog):
    caplog.set_level("INFO", "paged_llm")
    reference = write_checkpoint(tmp_path / "model", CONFIG, name)
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32, attn_implementation="eager")
    adapter = make_adapter(model, tmp_path / "adapter")
    adapters = write_adapter_list(tmp_path, {"one": adapter})
    expected = [generate_with(model, adapter, PROMPT, 12), generate_with_transformers(model, PROMPT, 12)]
    assert expected[0] != expected[1]
    with running(tiny_assembly(tmp_path / "model", adapters=adapters, **LORA)) as engine:
        keys = [engine.submit(PROMPT, max_tokens=12, lora_name=lora) for lora in ("one", None)]
        assert [output.tokens for output in engine.wait(*keys)] == expected
    assert "all 14 quantized weights stay quantized" in caplog.text


@needs_kernels
def test_modules_that_are_not_quantized_stay_as_they_are(tmp_path, caplog):
    caplog.set_level("INFO", "paged_llm")
    reference = write_checkpoint(tmp_path / "model", CONFIG, "w4a16", ignored=r"layers\.1\.|v_proj")
    with running(tiny_assembly(tmp_path / "model")) as engine:
        assert engine.generate([PROMPT], max_tokens=12)[0] == expected_tokens(reference)
    assert "all 6 quantized weights stay quantized" in caplog.text


def test_weights_are_widened_without_kernels(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "paged_llm")
    reference = write_checkpoint(tmp_path / "model", CONFIG, "gptq-4")
    monkeypatch.setattr(native, "levels", lambda: ())
    with running(tiny_assembly(tmp_path / "model")) as engine:
        assert engine.generate([PROMPT], max_tokens=12)[0] == expected_tokens(reference)
    elements = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    file = load_file(tmp_path / "model" / "model.safetensors")
    stored = sum(
        tensor.nbytes for name, tensor in file.items() if name.endswith(("qweight", "qzeros", "scales", "g_idx"))
    )
    mib = f"{(4 * elements - stored) / 2**20:.1f}"
    assert f"14 of 14 quantized weights are widened to float32, which takes {mib} MiB more" in caplog.text


INVALID = {
    "awq-32": [
        ({"bits": 3}, r"quantization_config\.bits=3: must be 4 on a CPU"),
        ({"version": "gemv"}, r'quantization_config\.version="gemv": must be "gemm", "GEMM" on a CPU'),
    ],
    "gptq-4": [
        ({"bits": 3}, r"quantization_config\.bits=3: must be 4, 8 on a CPU"),
        ({"checkpoint_format": "marlin"}, r'checkpoint_format="marlin": must be "gptq", "gptq_v2"'),
        ({"dynamic": {"x": {"bits": 8}}}, r"quantization_config\.dynamic: other settings for some layers"),
        ({"bits": 8}, r"weight: g_idx of (64|128) inputs for a weight of (32|64)"),
    ],
    "w4a16": [
        ({"format": "nvfp4-pack-quantized"}, r'quantization_config\.format="nvfp4-pack-quantized": must be one of'),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, r"quantization_config\.sparsity_config: sparse weights"),
        ({"transform_config": {"config_groups": {}, "x": 1}}, r"quantization_config\.transform_config: transformed"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 3}}}}, r"group_0\.weights\.num_bits=3: must be 4 or 8"),
        ({"config_groups": {"group_0": 1}}, r"quantization_config is invalid"),
        ({"config_groups": {"group_0": {"format": "x"}}}, r'config_groups\.group_0\.format="x": must be one of'),
    ],
    "fp8-deepseek": [
        ({"weight_block_size": [128, 100]}, r"config\.weight_block_size=\[128, 100\]: must be two numbers"),
        ({"weight_block_size": [8, 8]}, r"proj\.weight: scales of shape \[\d, \d\] for a weight of shape \[\d+, \d+\]"),
        ({"quant_method": "awq"}, r"no tensor \*\.qweight, although quantization_config names AWQ"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fields", "message"), [(name, *case) for name, cases in INVALID.items() for case in cases]
)
def test_unsupported_variants_are_rejected(name, fields, message, tmp_path):
    write_checkpoint(tmp_path / "model", CONFIG, name)
    edit_config(tmp_path / "model", quantization_config=CHECKPOINTS[name][0] | fields)
    with pytest.raises(ConfigError, match=message):
        tiny_assembly(tmp_path / "model")


def change(directory, name, tensor):
    """Replace a tensor of a checkpoint, or remove it."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), file, metadata={"format": "pt"})


LAYER = "model.layers.0.mlp.up_proj"
CHANGES = [
    ("awq-32", ".scales", None, f"no tensor {LAYER}.scales"),
    ("gptq-4", ".scales", torch.zeros(3, 128), "g_idx has groups of different sizes"),
    ("awq-32", ".scales", torch.zeros(3, 128), "groups of 22 inputs: must be a multiple of 8"),
    ("gptq-4", ".g_idx", torch.zeros(64), "g_idx has groups of different sizes"),
    ("fp8-deepseek", ".weight", torch.zeros(128, 64).to(torch.float8_e5m2), "must be float8_e4m3fn"),
    ("fp8-deepseek", ".weight", torch.full((128, 64), torch.nan).to(torch.float8_e4m3fn), "contains NaN"),
    ("fp8-deepseek", ".weight_scale_inv", None, "has dtype torch.float8_e4m3fn, but no scales"),
    ("w4a16", ".weight_shape", torch.tensor([128, 72]), "for a weight of shape \\[128, 72\\]"),
]


@pytest.mark.parametrize(("name", "end", "tensor", "message"), CHANGES)
def test_inconsistent_tensors_are_rejected(name, end, tensor, message, tmp_path):
    write_checkpoint(tmp_path / "model", CONFIG, name)
    change(tmp_path / "model", LAYER + end, tensor)
    with pytest.raises(ConfigError, match=message):
        tiny_assembly(tmp_path / "model")


@pytest.mark.parametrize(("family", "end", "message"), [("gpt_oss", "_scales", "contains NaN")])
def test_invalid_mxfp4_is_rejected(family, end, message, tmp_path):
    write_checkpoint(tmp_path / "model", FAMILIES[family](), "mxfp4")
    change(
        tmp_path / "model",
        f"model.layers.0.mlp.experts.down_proj{end}",
        torch.full((4, 64, 3), 255, dtype=torch.uint8),
    )
    with pytest.raises(ConfigError, match=message):
        tiny_assembly(tmp_path / "model")


@pytest.mark.parametrize(
    ("method", "package"),
    [("awq", "gptqmodel"), ("gptq", "optimum"), ("compressed-tensors", "compressed-tensors"), ("hqq", "hqq")],
)
def test_missing_package_is_named(method, package, tmp_path, monkeypatch):
    monkeypatch.setattr(quantization_fields, "find_spec", lambda module: None)
    hf_config = LlamaConfig(quantization_config={"quant_method": method})
    with pytest.raises(ConfigError, match=f'quant_method="{method}": requires the package {package}, which is not'):
        check_method(hf_config, tmp_path, torch.device("cuda", 0))


def test_tensor_parallelism_is_rejected_for_formats_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(quantization_fields, "find_spec", lambda module: object())
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for settings, device in (({"load_in_4bit": True}, cpu), ({"quant_method": "awq", "bits": 4}, cuda)):
        with pytest.raises(ConfigError, match=r'tensor_parallel_size=2: must be 1 for weights of "(awq|bitsandbytes)"'):
            check_method(LlamaConfig(quantization_config=settings), tmp_path, device, 2)
    check_method(LlamaConfig(quantization_config={"quant_method": "awq", "bits": 4}), tmp_path, cpu, 2)
    check_method(LlamaConfig(quantization_config={"quant_method": "fp8"}), tmp_path, cuda, 2)


def test_weights_that_transformers_widens_are_logged(tmp_path, caplog):
    model = save_tiny(CONFIG, tmp_path)
    stored_weights.log_dequantized(tmp_path, model.bfloat16())
    assert "all quantized weights are widened to bfloat16 on cpu, which takes -" in caplog.text  # here they were wider
