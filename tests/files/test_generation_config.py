"""Defaults of sampling parameters from `generation_config.json`."""

import json
import logging

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.files.generation_config import read_sampling_defaults

FILE = "generation_config.json"
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "bos_token_id": 1}


def write(directory, **values):
    directory.mkdir(exist_ok=True)
    (directory / FILE).write_text(json.dumps(values))
    return directory


def read(model, root=None, **options):
    root = root or model / "no repository"
    config = EngineConfig.from_options({"model": str(model)} | options)
    return read_sampling_defaults(config.generation_config, config.override_generation_config, root, model)


def test_the_models_file_is_read(tmp_path, caplog):
    caplog.set_level(logging.INFO, "paged_llm.startup")
    defaults = read(write(tmp_path, **QWEN, max_new_tokens=9, repetition_penalty=1.0, no_repeat_ngram_size=3))
    assert defaults.max_tokens == 9
    assert defaults.values.items() >= {"temperature": 0.6, "top_k": 20, "top_p": 0.95}.items()
    shown = "temperature=0.6, top_k=20, top_p=0.95, max_tokens=9"
    assert caplog.messages == [f"default sampling parameters from {FILE}: {shown}"]


@pytest.mark.parametrize("values", [{}, {"eos_token_id": 2, "use_cache": True}, {"temperature": None, "top_p": 1.0}])
def test_files_without_sampling_parameters_change_nothing(tmp_path, caplog, values):
    caplog.set_level(logging.INFO, "paged_llm.startup")
    assert read(write(tmp_path, **values)) == read(tmp_path / "missing")
    assert not caplog.messages


def test_greedy_models_keep_only_what_applies_to_greedy_search(tmp_path, caplog):
    caplog.set_level(logging.INFO, "paged_llm.startup")
    values = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    assert read(write(tmp_path, **values)).values == {"repetition_penalty": 1.1}
    assert caplog.messages[0] == f"{FILE} has do_sample=false: its temperature, top_p is not used"


def test_vllm_reads_no_file(tmp_path):
    assert not read(write(tmp_path, **QWEN), generation_config="vllm").values


def test_another_directory_replaces_the_models(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "paged_llm.startup")
    model, other = write(tmp_path / "model", **QWEN), write(tmp_path / "other", top_k=5)
    assert read(model, generation_config=str(other)).values == {"top_k": 5}
    assert caplog.messages == [f"default sampling parameters from {other / FILE}: top_k=5"]
    assert read(model, root=tmp_path, generation_config="other").values == {"top_k": 5}
    monkeypatch.chdir(tmp_path)
    assert read(model, generation_config="other").values == {"top_k": 5}
    reason = f'generation_config="none": no {FILE} in {tmp_path}/none; give "auto", "vllm"'
    with pytest.raises(ConfigError, match=reason):
        read(model, root=tmp_path, generation_config="none")


def test_overrides_replace_single_values(tmp_path, caplog):
    caplog.set_level(logging.INFO, "paged_llm.startup")
    changes = {"temperature": 0.2, "top_k": 0, "max_new_tokens": 7}
    defaults = read(write(tmp_path, **QWEN), override_generation_config=changes)
    shown = "temperature=0.2, top_p=0.95, max_tokens=7"
    assert defaults.max_tokens == 7
    assert caplog.messages == [f"default sampling parameters from {FILE} and override_generation_config: {shown}"]
    only = read(tmp_path, generation_config="vllm", override_generation_config={"min_p": 0.5})
    assert only.values == {"min_p": 0.5}
    assert caplog.messages[-1] == "default sampling parameters from override_generation_config: min_p=0.5"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"temperature": -1}, r"temperature=-1: must be at least 0 and at most 100; correct it, or set generation_con"),
        ({"top_p": "most"}, r'top_p="most": must be a number'),
        ({"max_new_tokens": 1.5}, r"max_new_tokens=1\.5: must be a whole number 1\.\."),
    ],
)
def test_invalid_values_name_the_file(tmp_path, values, reason):
    with pytest.raises(ConfigError, match=f"{tmp_path / FILE}: {reason}"):
        read(write(tmp_path, **values))
    assert not read(tmp_path, generation_config="vllm").values


def test_a_gguf_file_has_no_defaults(tmp_path):
    write(tmp_path, **QWEN)
    assert not read(tmp_path / "model.gguf").values
