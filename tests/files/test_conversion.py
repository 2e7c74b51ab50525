"""Errors of models with pickle files name a command that converts them."""

import json
import os
import pickle
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.loading import model_loader
from tests.support.in_process import TINY, save_tiny

WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"


def load(directory):
    config = EngineConfig.from_options({"model": str(directory)} | TINY)
    return model_loader.load(config, Path(directory), torch.device("cpu")).model


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request, tmp_path):
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=request.param,
    )  # fmt: skip
    tensors = save_tiny(config, tmp_path).state_dict()
    (tmp_path / WEIGHTS).unlink()
    return tmp_path, tensors


def command(directory):
    """Return the Python code of the command in the error of a load."""
    with pytest.raises(ConfigError, match="convert ") as caught:
        load(directory)
    text = str(caught.value)
    python, flag, code = shlex.split(text[text.index("python -c ") :])
    assert (python, flag) == ("python", "-c")
    return code


def check_converted(directory, tensors):
    converted = load(directory).state_dict()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())


def test_pytorch_model(model):
    directory, tensors = model
    torch.save(tensors, directory / PICKLE)
    exec(command(directory), {})
    check_converted(directory, tensors)


def test_shards(model):
    directory, tensors = model
    shards = {name: f"pytorch_model-0000{number % 2 + 1}-of-00002.bin" for number, name in enumerate(tensors)}
    for shard in set(shards.values()):
        torch.save({name: tensors[name] for name in shards if shards[name] == shard}, directory / shard)
    (directory / f"{PICKLE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    exec(command(directory), {})
    check_converted(directory, tensors)


def test_file_of_tensors(model):
    directory, tensors = model
    torch.save(tensors, directory / "it's.pt")
    exec(command(directory), {})
    check_converted(directory, tensors)


def test_model_of_the_hub(model):
    """The hub's cache gets no pickles, so the command reads the model from the hub, here from a directory."""
    directory, tensors = model
    cached = directory / "models--owner--name/snapshots/abc"
    shutil.copytree(directory, cached)
    torch.save(tensors, directory / PICKLE)
    code = command(cached)
    assert code.count('"owner/name"') == code.count('"name"') == 2
    code = code.replace('"owner/name"', json.dumps(str(directory))).replace(
        '"name"', json.dumps(str(directory / "new"))
    )
    exec(code, {})
    check_converted(directory / "new", tensors)


def test_several_files_of_tensors_are_not_converted(model):
    directory, tensors = model
    for name in ("a.pth", "b.pth"):
        torch.save(tensors, directory / name)
    with pytest.raises(ConfigError, match=r"a\.pth is a pickle file, .* is not read; save it as \.safetensors"):
        load(directory)


class Payload:
    """Creates a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", [PICKLE, "model.pt"])
def test_code_in_a_pickle_is_not_executed(tiny, tmp_path, name):
    shutil.copytree(tiny[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(Exception, match=r"(?i)weights.?only"):
        exec(command(tmp_path), {})
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / WEIGHTS).exists()
