"""Loading a model: dummy weights, missing weights, the KV cache budget and end-of-sequence ids."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from paged_backend.api.errors import ConfigError
from paged_backend.memory import kv_cache
from paged_backend.memory.kv_cache import LayerShape
from tests.support.families import COMMON
from tests.support.in_process import byte_tokenizer, running, tiny_assembly


def test_dummy_weights_need_no_weight_file_and_follow_the_seed(tmp_path):
    LlamaConfig(**COMMON).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no weights: neither model\.safetensors"):
        tiny_assembly(tmp_path)

    def tokens(seed):
        with running(tiny_assembly(tmp_path, load_format="dummy", seed=seed)) as engine:
            return engine.generate([[1, 2, 3]], max_tokens=12)

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_missing_tokenizer_is_an_error(tmp_path):
    LlamaConfig(**COMMON).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"tokenizer: no loadable tokenizer in {tmp_path}"):
        tiny_assembly(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_model_len": 257}, "max_model_len=257: must be at most 256"),
        ({"max_model_len": 200, "num_gpu_blocks_override": 8}, "max_model_len=200: the KV cache holds only 32"),
        ({"num_gpu_blocks_override": 2 * 10**12}, r"num_gpu_blocks_override=2000000000000: a pool of .* GiB"),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 10**15},
            "kv_cache_memory_bytes=1000000000000000: a",
        ),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes=100: one block"),
    ],
)
def test_option_beyond_model_or_memory_is_rejected(tiny, options, reason):
    with pytest.raises(ConfigError, match=reason):
        tiny_assembly(tiny[0], **options)


def test_pool_size_follows_byte_budget(tiny):
    assembly = tiny_assembly(tiny[0], num_gpu_blocks_override=None, kv_cache_memory_bytes=100_000)
    layers = (LayerShape(num_kv_heads=2, head_dim=16),) * 3
    per_block = kv_cache.bytes_per_block(layers, 4, torch.float32)
    assert per_block == 3 * 2 * 2 * 16 * 4 * 4
    assert assembly.scheduler.blocks.num_blocks == 100_000 // per_block
    nbytes = sum(tensor.nbytes for tensor in assembly.runner.kv.tensors)
    assert nbytes == assembly.scheduler.blocks.num_blocks * per_block


def test_pool_size_follows_available_memory(tiny, monkeypatch):
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 2_000_000)
    small = tiny_assembly(tiny[0], num_gpu_blocks_override=None).scheduler.blocks.num_blocks
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 4_000_000)
    large = tiny_assembly(tiny[0], num_gpu_blocks_override=None).scheduler.blocks.num_blocks
    assert (small, large) == (1_000_000 // 3072, 2_000_000 // 3072)


def test_eos_ids_of_all_files_within_vocabulary(tiny, tmp_path, caplog):
    _, model = tiny
    model.save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 320, -1]}))
    assert tiny_assembly(tmp_path).loaded.spec.eos_ids == {7, 9, tokenizer.eos_token_id}
    assert "eos_token_id: ignored [-1, 320]: must be within 0..319" in caplog.text


def resave(tiny, directory, change):
    """Copy the tiny model with changed weights."""
    shutil.copytree(tiny[0], directory, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_missing_weights_are_an_error(tiny, tmp_path):
    resave(tiny, tmp_path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight missing"):
        tiny_assembly(tmp_path)


def test_weights_of_wrong_shape_are_rejected(tiny, tmp_path):
    resave(tiny, tmp_path, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight missing or not in the shape"):
        tiny_assembly(tmp_path)
