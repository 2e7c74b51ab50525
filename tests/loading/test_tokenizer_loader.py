"""Loading a tokenizer: errors name the file, and the chat template is checked."""

import json

import pytest
from transformers import LlamaConfig

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.loading.model_source import load_tokenizer
from tests.support.families import COMMON
from tests.support.in_process import byte_tokenizer, tiny_assembly


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / "model"
    byte_tokenizer().save_pretrained(directory)
    return directory


def load(directory, **options):
    return load_tokenizer(EngineConfig.from_options({"model": "x"} | options), directory.parent, directory)


def test_tokenizer_of_the_options_replaces_that_of_the_model(directory, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path / "other")
    assert "<extra>" not in load(directory).get_vocab()
    assert "<extra>" in load(directory, tokenizer="other").get_vocab()


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", '{"model": 1}'), ("tokenizer_config.json", '{"tokenizer_class": 5}')]
)
def test_file_that_cannot_be_loaded_is_named(directory, name, content):
    (directory / name).write_text(content)
    with pytest.raises(ConfigError, match=f"tokenizer: {directory / name} cannot be loaded: "):
        load(directory)


def test_invalid_chat_template_is_rejected(directory):
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{% for one in %}"}))
    with pytest.raises(ConfigError, match=f"tokenizer: the chat template in {directory} "):
        load(directory)


def test_missing_tokenizer_is_an_error(tmp_path):
    LlamaConfig(**COMMON).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"tokenizer: no loadable tokenizer in {tmp_path}"):
        tiny_assembly(tmp_path, load_format="dummy")
