"""Engine options that depend on the model and the device."""

import pytest
import torch
import transformers as hf
from transformers import LlamaConfig

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.loading import description
from paged_backend.loading.description import check_batch_invariance, check_quantization
from paged_backend.loading.model_source import ModelSource
from paged_kernels.cpu import native
from tests.support.families import COMMON, DYNAMIC, LONGROPE
from tests.support.gguf import CONFIG, write_gguf
from tests.support.in_process import save_tiny, tiny_assembly


@pytest.mark.parametrize("model_dtype", [None, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_auto_dtype_on_gpu_and_cpu(model_dtype, monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda answer=supported: answer)
        assert description.pick_dtype("auto", model_dtype, cpu) == expected
        assert description.pick_dtype("auto", model_dtype, cuda) == (model_dtype or torch.float32)
        assert description.pick_dtype("half", model_dtype, cpu) == torch.float16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_an_error(tiny):
    with pytest.raises(ConfigError, match='device="cuda"'):
        tiny_assembly(tiny[0], device="cuda")


@pytest.mark.parametrize(
    ("rope_type", "config"),
    [
        ("longrope", hf.Phi3Config(**COMMON, original_max_position_embeddings=64, rope_parameters=dict(LONGROPE))),
        ("dynamic", hf.LlamaConfig(**COMMON | {"max_position_embeddings": 64}, rope_parameters=dict(DYNAMIC))),
    ],
)
def test_length_dependent_rope_limits_context_length(rope_type, config):
    """For a longer sequence, `generate` recomputes every position or depends on the rest of the batch."""
    assert description.pick_max_model_len(None, config) == 64
    with pytest.raises(ConfigError, match=f'max_model_len=65: must be at most 64, .* rope type "{rope_type}"'):
        description.pick_max_model_len(65, config)


def test_unsupported_int8_quantization_is_rejected(tiny, tmp_path, monkeypatch):
    config = EngineConfig.from_options({"model": str(tiny[0]), "quantization": "int8"})
    plain, cpu = LlamaConfig(), torch.device("cpu")

    def check_rejected(reason, hf_config=plain, device=cpu):
        with pytest.raises(ConfigError, match=f'quantization="int8": {reason}'):
            check_quantization(config, ModelSource("m", tmp_path, hf_config), device)

    monkeypatch.setattr(native, "levels", lambda: ("plain",))
    check_quantization(config, ModelSource("m", tmp_path, plain), cpu)
    check_rejected("only supported on a CPU", device=torch.device("cuda", 0))
    check_rejected(
        "the model's weights are quantized already", LlamaConfig(quantization_config={"quant_method": "awq"})
    )
    dequantized = LlamaConfig(quantization_config={"quant_method": "fp8"})
    check_quantization(config, ModelSource("m", tmp_path, dequantized), cpu)
    monkeypatch.setattr(native, "levels", lambda: ())
    check_rejected("requires the CPU kernels, which have not been compiled")
    with pytest.raises(ConfigError, match='quantization="int8": requires the CPU'):
        tiny_assembly(tiny[0], quantization="int8", device="cpu")


def test_quantized_weights_are_not_batch_invariant_on_a_gpu(tmp_path, monkeypatch):
    config = EngineConfig.from_options({"model": "x", "batch_invariant": True})
    quantized, gpu = LlamaConfig(quantization_config={"quant_method": "awq"}), torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="batch_invariant=true: not supported on a GPU with quantized weights"):
        check_batch_invariance(config, ModelSource("m", tmp_path, quantized), gpu)
    monkeypatch.setattr(native, "levels", lambda: ())
    check_batch_invariance(config, ModelSource("m", tmp_path, LlamaConfig()), gpu)  # which needs no CPU kernels
    with pytest.raises(ConfigError, match="batch_invariant=true: requires the CPU kernels"):
        check_batch_invariance(config, ModelSource("m", tmp_path, LlamaConfig()), torch.device("cpu"))


@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
@pytest.mark.parametrize("option", ["int8", "int4"])
@pytest.mark.parametrize(("stored", "is_rejected"), [("Q8_0", True), ("Q4_0", True), ("F16", False), ("F32", False)])
def test_quantized_weights_of_a_gguf_are_not_rounded_again(tmp_path, option, stored, is_rejected):
    model = save_tiny(CONFIG, tmp_path / "model")
    write_gguf(tmp_path / "tiny.gguf", model, stored)
    options = {"quantization": option, "tokenizer": str(tmp_path / "model"), "device": "cpu"}
    if not is_rejected:
        assert tiny_assembly(tmp_path / "tiny.gguf", **options).loaded.spec.weight_format is None
        return
    with pytest.raises(
        ConfigError, match=f'quantization="{option}": the model\'s weights are quantized already; leave'
    ):
        tiny_assembly(tmp_path / "tiny.gguf", **options)
