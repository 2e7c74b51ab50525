"""Finding the files of a model locally and on the Hugging Face hub."""

import json
from dataclasses import replace

import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.files import hub
from paged_backend.loading import model_loader, model_source
from paged_backend.loading.model_source import load_tokenizer


def test_relative_path_is_found_in_model_repository(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/config.json").write_text("{}")
    config = EngineConfig.from_options({"model": "here"})
    assert model_source.find_files(config.model, tmp_path, config) == tmp_path / "here"
    for name in ("gone", "gone.gguf", "owner/gone.gguf"):
        with pytest.raises(ConfigError, match=rf'^model="{name}": {tmp_path}/{name} does not exist; give a'):
            model_source.find_files(name, tmp_path, config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=rf'model="empty": no config\.json in {tmp_path}/empty'):
        model_source.find_files("empty", tmp_path, config)


def test_relative_path_falls_back_to_working_directory(tmp_path, monkeypatch):
    """vLLM accepts paths such as `./weights/model` as well."""
    for base in ("root", "start"):
        (tmp_path / base / "both").mkdir(parents=True)
        (tmp_path / base / "both/config.json").write_text("{}")
    (tmp_path / "start/own").mkdir()
    (tmp_path / "start/own/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "start")
    config = EngineConfig.from_options({"model": "./own"})
    assert model_source.find_files("./own", tmp_path / "root", config) == tmp_path / "start/own"
    assert model_source.find_files("both", tmp_path / "root", config) == tmp_path / "root/both"


def test_hub_model_is_found_in_cache(tmp_path, monkeypatch):
    """A cached model is found without network access."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--model"
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "snapshots/abc/config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    config = EngineConfig.from_options({"model": "owner/model"})
    assert model_source.find_files(config.model, tmp_path, config) == repository / "snapshots/abc"
    with pytest.raises(ConfigError, match=r'model="owner/other": .*, and the hub cannot be reached: '):
        model_source.find_files("owner/other", tmp_path, config)


def test_hub_revision_and_download_dir(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, revision in (("model", "v1"), ("tokenizer", "v2")):
        repository = tmp_path / f"models--owner--{name}"
        (repository / "snapshots/abc").mkdir(parents=True)
        (repository / "snapshots/abc/config.json").write_text(json.dumps({"model_type": "llama"}))
        (repository / "refs").mkdir()
        (repository / "refs" / revision).write_text("abc")
    options = {"model": "owner/model", "tokenizer": "owner/tokenizer", "download_dir": str(tmp_path), "revision": "v1"}
    config = EngineConfig.from_options(options)
    with pytest.raises(ConfigError, match='model="owner/tokenizer": not a directory'):  # it has no main branch
        load_tokenizer(config, tmp_path, tmp_path)
    with pytest.raises(ConfigError, match=f"tokenizer: no loadable tokenizer in {tmp_path}/models--owner--tokenizer"):
        load_tokenizer(replace(config, tokenizer_revision="v2"), tmp_path, tmp_path)
    with pytest.raises(ConfigError, match='model="owner/model": not a directory'):
        model_loader.load(replace(config, revision="v3"), tmp_path, torch.device("cpu"))


def test_unknown_name_is_told_from_a_missing_network(tmp_path, monkeypatch):
    """Only the hub knows that it has no such model."""

    def fail(*arguments, **options):
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError, "404")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match='model="owner/other": neither a directory nor on the hub, or private: '):
        model_source.find_files("owner/other", tmp_path, EngineConfig(model="owner/other"))
