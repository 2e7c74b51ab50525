"""Models whose files hold quantized weights: what transformers makes of them is what is served."""

import json

import gguf
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig

from paged_backend.execution.attention import UnsupportedModel
from paged_backend.loading.proof import prove
from tests.in_process import byte_tokenizer, generate_alone, running, save_tiny, tiny_assembly

CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
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
    assert served(tmp_path) == generate_alone(alone, PROMPT, 12)


def write_gguf(file, model):
    """The weights of a tiny Llama in 8 bits, under llama.cpp's names."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(320)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weight in model.state_dict().items():
        kind = gguf.GGMLQuantizationType.Q8_0 if weight.dim() == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(weight.float().numpy(), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_a_model(tmp_path):
    model = save_tiny(CONFIG, tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_gguf(tmp_path / "tiny.gguf", model)
    alone = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    assert served(tmp_path / "tiny.gguf", tokenizer=str(tmp_path / "tokenizer")) == generate_alone(alone, PROMPT, 12)


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
