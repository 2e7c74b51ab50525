"""Models with quantized weights generate the same tokens as in transformers."""

import json
import re

import gguf
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GgufConfig

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.loading import weights
from paged_backend.loading.gguf_weights import read_quickly
from paged_backend.loading.model_source import ModelSource
from paged_kernels.cpu import native
from tests.support.gguf import CONFIG, write_gguf
from tests.support.in_process import byte_tokenizer, generate_with_transformers, running, save_tiny, tiny_assembly
from tests.support.pairwise import mostly_nightly

PROMPT = list(range(1, 30))


def generate(path, **options):
    with running(tiny_assembly(path, **options)) as engine:
        return engine.generate([PROMPT], max_tokens=12)[0]


def test_fp8_blocks_are_dequantized(tmp_path):
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
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=hf.FineGrainedFP8Config(**quantization)
    )
    assert generate(tmp_path) == generate_with_transformers(reference, PROMPT, 12)


@pytest.mark.parametrize("format", mostly_nightly(["Q8_0", "Q5_1", "Q4_1", "Q4_0", "F16"], default=["Q4_1", "F16"]))
def test_gguf_file_loads(tmp_path, format, caplog, monkeypatch):
    caplog.set_level("INFO", "paged_llm")
    read, parse = [], gguf.GGUFReader._build_fields
    monkeypatch.setattr(
        gguf.GGUFReader, "_build_fields", lambda reader, *rest: read.append(reader) or parse(reader, *rest)
    )
    model = save_tiny(CONFIG, tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_gguf(tmp_path / "tiny.gguf", model, format)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    read.clear()
    tokens = generate(tmp_path / "tiny.gguf", tokenizer=str(tmp_path / "tokenizer"))
    assert tokens == generate_with_transformers(reference, PROMPT, 12)
    assert len(read) == 1, "its metadata are read once"
    stays_quantized = format != "F16" and bool(native.levels())
    assert ("with the GGUF weights of the files" in caplog.text) == stays_quantized
    phases = ("converting weights", "loading weights", *(("packing weights",) if native.levels() else ()))
    for phase in phases:
        assert re.search(rf"progress: {phase} ([1-9]\d*)/\1 ", caplog.text), f"{phase} is reported up to its end"


@pytest.mark.parametrize("endianess", gguf.GGUFEndian)
def test_gguf_metadata_are_those_of_the_gguf_package(tmp_path, endianess):
    writer = gguf.GGUFWriter(tmp_path / "some.gguf", "llama", endianess=endianess)
    writer.add_array("some.texts", ["", "ä", "three words here"] * 5)
    writer.add_array("some.numbers", [0.5, -1.0])
    writer.add_array("some.flags", [True, False])
    writer.add_array("some.lists", [[1, 2], [3]])
    writer.add_string("some.text", "one")
    writer.add_uint64("some.number", 2**40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = gguf.GGUFReader(tmp_path / "some.gguf").fields
    with read_quickly(tmp_path / "some.gguf"):
        found = gguf.GGUFReader(tmp_path / "some.gguf").fields
    assert found.keys() == expected.keys()
    for name, field in expected.items():
        own = found[name]
        assert (own.data, own.types, own.offset) == (field.data, field.types, field.offset), name
        assert [part.tolist() for part in own.parts] == [part.tolist() for part in field.parts], name


@pytest.mark.nightly
@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
def test_gguf_weights_stay_quantized_with_tensor_parallelism(tmp_path, caplog):
    caplog.set_level("INFO", "paged_llm")
    model = save_tiny(CONFIG, tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_gguf(tmp_path / "tiny.gguf", model, "Q4_0")
    options = {"tokenizer": str(tmp_path / "tokenizer")}
    expected = generate(tmp_path / "tiny.gguf", **options)
    caplog.clear()
    assert generate(tmp_path / "tiny.gguf", tensor_parallel_size=2, **options) == expected
    # The output layer gathers the outputs of all ranks, and the embedding is looked up.
    assert "2 of 16 quantized weights are widened to float32, which takes" in caplog.text


def config_of(path, **options):
    return EngineConfig.from_options({"model": str(path)} | options)


def test_dummy_weights_are_generated_on_the_device(tiny):
    shape = hf.AutoConfig.from_pretrained(tiny[0])
    source = ModelSource("tiny", tiny[0], shape, dummy_seed=0)
    model = weights.load_weights(source, torch.float32, torch.device("meta"))
    assert all(parameter.is_meta for parameter in model.parameters())
    made = [weights.load_weights(source, torch.float32, torch.device("cpu")) for _ in range(2)]
    pairs = zip(*(model.parameters() for model in made), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("device", "accelerate", "expected"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_files_are_read_to_a_gpu(tiny, monkeypatch, device, accelerate, expected):
    asked = {}

    def from_pretrained(**options):
        asked.update(options)
        raise OSError("no GPU")

    monkeypatch.setattr(weights.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(weights, "is_accelerate_available", lambda: accelerate)
    source = ModelSource("tiny", tiny[0], hf.AutoConfig.from_pretrained(tiny[0]))
    with pytest.raises(ConfigError, match="no GPU"):
        weights.load_weights(source, torch.float32, torch.device(device))
    assert asked.get("device_map") == (torch.device(device) if expected else None)
