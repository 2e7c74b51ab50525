"""Loading a model: dummy weights, missing weights and end-of-sequence ids."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from paged_backend.api.errors import ConfigError
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
