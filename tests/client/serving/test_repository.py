"""The model repository of a server, and the names of models."""

import json
from pathlib import Path

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.limits import InputLimits
from paged_client.commands.arguments import parse_pairs
from paged_client.serving import demo_model
from paged_client.serving.repository import check_options, resolve_model, resolve_models, write_repository

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
