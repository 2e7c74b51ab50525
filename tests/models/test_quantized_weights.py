"""Models whose files hold quantized weights: what transformers makes of them is what is served."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GgufConfig

from paged_backend.loading.proof import prove
from paged_backend.models.attention import UnsupportedModel
from tests.support.gguf import CONFIG, write_gguf
from tests.support.in_process import byte_tokenizer, generate_with_transformers, running, save_tiny, tiny_assembly

PROMPT = list(range(1, 30))


def served(place, **options):
    with running(tiny_assembly(place, **options)) as engine:
        return engine.generate([PROMPT], max_tokens=12)[0]


def test_fp8_blocks_with_scales_are_widened(tmp_path):
    save_tiny(CONFIG, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if "proj.weight" in name]:
        blocks = weights[name].unflatten(1, (-1, 32)).unflatten(0, (-1, 32))  # [rows, 32, columns, 32]
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).flatten(0, 1).flatten(1).to(torch.float8_e4m3fn)
        weights |= {name: codes, f"{name}_scale_inv": scales}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": quantization}))
    quantization["dequantize"] = True
    alone = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=hf.FineGrainedFP8Config(**quantization)
    )
    assert served(tmp_path) == generate_with_transformers(alone, PROMPT, 12)


def test_a_gguf_file_is_a_model(tmp_path):
    model = save_tiny(CONFIG, tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_gguf(tmp_path / "tiny.gguf", model)
    alone = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    assert served(tmp_path / "tiny.gguf", tokenizer=str(tmp_path / "tokenizer")) == generate_with_transformers(
        alone, PROMPT, 12
    )


def test_activations_of_8_bits_are_near_enough_where_the_model_says_so(tmp_path):
    """As torchao, bitsandbytes and compressed-tensors round them, which no test here depends on."""
    model = save_tiny(CONFIG, tmp_path)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)
    with pytest.raises(UnsupportedModel, match="logits at position"):
        prove(model, block_size=4, kv_dtype=torch.float32)
    model.config.quantization_config = {"quant_method": "some"}
    assert len(prove(model, block_size=4, kv_dtype=torch.float32)) == 2


def rounded(module, arguments):
    scale = arguments[0].abs().amax() / 127  # of all rows, so that they depend on which others there are
    return ((arguments[0] / scale).round() * scale,)
