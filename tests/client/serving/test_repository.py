"""The model repository of a server, and the names of models."""

import json
import os
from pathlib import Path

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.limits import InputLimits
from paged_client.commands.arguments import parse_pairs
from paged_client.serving import demo_model
from paged_client.serving.repository import (
    check_options,
    make_repository,
    resolve_model,
    resolve_models,
    write_repository,
)

ROOT = Path(__file__).parents[3]


def test_missing_model_is_rejected(tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(ValueError, match=missing):
        resolve_model(missing)
    assert resolve_model(tmp_path) == str(tmp_path)
    assert resolve_model("owner/model-1.5B") == "owner/model-1.5B"


def test_speculative_model_is_resolved_like_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model, "prepare", lambda: tmp_path)
    missing = str(tmp_path / "missing")
    for name in ("model", "speculative_model"):
        assert resolve_models({"model": "owner/model", "seed": 1, name: "demo"})[name] == str(tmp_path)
        with pytest.raises(ValueError, match=f"^{name}='{missing}': must be 'demo', a directory"):
            resolve_models({name: missing})
    assert resolve_models({"speculative_model": None}) == {"speculative_model": None}


def test_options_override_the_repository(repository, tmp_path):
    write_repository(repository, tmp_path / "copy", {"model": "/m", "seed": 7})
    written = json.loads((tmp_path / "copy/paged_llm/1/model.json").read_text())
    assert written == {"model": "/m", "block_size": 16, "seed": 7}
    assert (tmp_path / "copy/paged_llm/config.pbtxt").is_file()


def test_only_the_model_of_the_engine_is_copied(tmp_path):
    write_repository(ROOT / "model_repository", tmp_path / "all", {})
    write_repository(ROOT / "model_repository", tmp_path / "one", {}, engine_only=True)
    assert {"paged_llm", "ensemble"} < {model.name for model in (tmp_path / "all").iterdir()}
    assert [model.name for model in (tmp_path / "one").iterdir()] == ["paged_llm"]


def test_limits_on_the_command_line_are_merged_with_those_of_model_json(repository, tmp_path):
    options = repository / "paged_llm/1/model.json"
    options.write_text(json.dumps({"model": "m", "limits": {"max_tools": 1, "max_choices": 1}}))
    pairs = parse_pairs("-o", ["limits.max_tools=8", 'limits={"max_messages": 4}', "max_stop_strings=2"])
    check_options({"model": "m"} | pairs)
    write_repository(repository, tmp_path / "copy", pairs)
    config = EngineConfig.from_file(tmp_path / "copy/paged_llm/1/model.json")
    assert config.limits == InputLimits(max_tools=8, max_choices=1, max_messages=4, max_stop_strings=2)


def test_repository_without_the_model_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="has no paged_llm/"):
        write_repository(tmp_path, tmp_path / "copy", {})


def test_repository_options_are_the_documented_defaults():
    assert json.loads((ROOT / "model_repository/paged_llm/1/model.json").read_text()) == {
        "model": ".cache/models/SmolLM2-135M-Instruct",
        "dtype": "auto",
        "block_size": 16,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
    }


def test_a_made_repository_depends_on_its_options(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path / "cache"))
    one, two = (make_repository({"model": str(tmp_path), "seed": seed}) for seed in (1, 2))
    assert one != two
    assert json.loads((one / "paged_llm/1/model.json").read_text())["seed"] == 1
    assert {"paged_llm", "ensemble"} < {model.name for model in two.iterdir()}
    written = (one / "paged_llm/1/model.json").stat()
    assert make_repository({"seed": 1, "model": str(tmp_path)}) == one
    assert (one / "paged_llm/1/model.json").stat().st_mtime_ns == written.st_mtime_ns
    assert not os.path.lexists(one / "paged_llm/1/multi_lora.json")


def test_a_made_repository_with_adapters_in_a_given_directory(tmp_path):
    listing = tmp_path / "adapters.json"
    listing.write_text("{}")
    (tmp_path / "models").mkdir()  # empty
    options = {"model": str(tmp_path), "served_model_name": "own"}
    made = make_repository(options, listing, tmp_path / "models")
    assert made == tmp_path / "models"
    assert json.loads((made / "own/1/model.json").read_text())["enable_lora"] is True
    assert (made / "own/1/multi_lora.json").resolve() == listing
    with pytest.raises(ValueError, match="models: is not empty"):
        make_repository(options, listing, made)
