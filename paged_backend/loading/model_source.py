"""Find the files of a model or tokenizer, locally or on the Hugging Face hub, and read its configuration."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.files import hub, model_files
from paged_backend.files.model_files import GGUF, possible_paths
from paged_backend.files.start_checks import find_local, is_model, is_on_hub, no_model
from paged_backend.files.tokenizer_files import FAST
from paged_backend.loading import load_progress


def find_files(name: str, root: Path, config: EngineConfig, revision: str | None = None) -> Path:
    """Return the directory or GGUF file of a model or tokenizer. Raises ConfigError.

    A relative path is looked up in `root` and then in the working directory. Anything else is the name of a repository
    on the Hugging Face hub, which is downloaded in the given revision if it is not in the cache, unless it ends like a
    GGUF file.
    """
    found = find_local(name, root)
    if found and (is_model(found) or (found / FAST).is_file()):
        return found
    if found is None and is_on_hub(name):
        return _download(name, config, revision)
    raise no_model("model", name, found or possible_paths(name, root)[0])


def _download(name: str, config: EngineConfig, revision: str | None) -> Path:
    patterns = ["*.json", "*.model", "*.txt", "*.jinja"]
    patterns += ["*.safetensors"] if config.load_format != "dummy" else []
    patterns += ["*.py"] if config.trust_remote_code else []
    return hub.fetch(name, config, revision, patterns, bar=load_progress.download_bar(name))


def source_arguments(path: Path) -> dict[str, str]:
    """Return the arguments that name a model directory or GGUF file to `from_pretrained`."""
    if path.suffix == GGUF:
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(path)}


def read_config(config: EngineConfig, path: Path) -> PretrainedConfig:
    """Read the model's configuration. Raises ConfigError."""
    if path.suffix != GGUF:
        model_files.check_text_files(path)
    try:
        return AutoConfig.from_pretrained(**source_arguments(path), trust_remote_code=config.trust_remote_code)
    except Exception as error:  # e.g. invalid JSON, unknown architecture, inconsistent values
        if path.suffix == GGUF:
            model_files.check_gguf(path)  # names a truncated file
            raise ConfigError(f"{path}: {error}") from error
        raise ConfigError(f"model={json.dumps(config.model)}: config.json: {error}") from error
