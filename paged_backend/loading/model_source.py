"""Find the files of a model, locally or on the Hugging Face hub, and read its configuration and tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.files import hub, model_files
from paged_backend.files.model_files import GGUF, possible_paths
from paged_backend.files.start_checks import ROOT, find_local, is_model, is_on_hub, no_model, read_template
from paged_backend.files.tokenizer_files import FAST
from paged_backend.loading import load_progress
from paged_backend.text.templates import check_template
from paged_backend.utils.startup import Progress


@dataclass(frozen=True, eq=False)
class ModelSource:
    """The files of a model, and how they are read."""

    name: str  # as in the options
    path: Path  # a directory or a GGUF file
    hf_config: PretrainedConfig
    trust_remote_code: bool = False
    dummy_seed: int | None = None  # seed of random weights; None: the files have the weights

    @classmethod
    def read(cls, config: EngineConfig, path: Path) -> ModelSource:
        """Return the source of the model that the options name. path: its files. Raises ConfigError."""
        if path.suffix != GGUF:
            model_files.check_text_files(path)
        trusted = config.trust_remote_code
        try:
            hf_config = AutoConfig.from_pretrained(**source_arguments(path), trust_remote_code=trusted)
        except Exception as error:  # e.g. invalid JSON, unknown architecture, inconsistent values
            if path.suffix == GGUF:
                model_files.check_gguf(path)  # names a truncated file
                raise ConfigError(f"{path}: {error}") from error
            raise ConfigError(f"model={json.dumps(config.model)}: config.json: {error}") from error
        return cls(config.model, path, hf_config, trusted, config.seed if config.load_format == "dummy" else None)


def find_model(config: EngineConfig, root: Path = ROOT) -> Path:
    """Return the directory or GGUF file of the model that the options name. Raises ConfigError."""
    return find_files(config.model, root, config, config.revision)


def find_files(name: str, root: Path, config: EngineConfig, revision: str | None = None) -> Path:
    """Return the directory or GGUF file of a model or tokenizer. Raises ConfigError.

    A relative path is looked up in `root` and then in the working directory. Anything else is the name of a repository
    on the Hugging Face hub, which is downloaded in the given revision if it is not in the cache, unless it ends like a
    GGUF file.
    """
    path = find_local(name, root)
    if path and (is_model(path) or (path / FAST).is_file()):
        return path
    if path is None and is_on_hub(name):
        return _download(name, config, revision)
    raise no_model("model", name, path or possible_paths(name, root)[0])


def _download(name: str, config: EngineConfig, revision: str | None) -> Path:
    patterns = ["*.json", "*.model", "*.txt", "*.jinja"]
    patterns += ["*.safetensors"] if config.load_format != "dummy" else []
    patterns += ["*.py"] if config.trust_remote_code else []
    return hub.fetch(name, patterns, revision, config.download_dir, bar=load_progress.download_bar(name))


def source_arguments(path: Path) -> dict[str, str]:
    """Return the arguments that name a model directory or GGUF file to `from_pretrained`."""
    if path.suffix == GGUF:
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(path)}


def load_tokenizer(config: EngineConfig, root: Path, model_path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the options name, or else the model's own. Raises ConfigError."""
    path = find_files(config.tokenizer, root, config, config.tokenizer_revision) if config.tokenizer else model_path
    if path.suffix != GGUF:
        model_files.check_text_files(path)
    progress = Progress("reading the tokenizer", 1)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source_arguments(path), trust_remote_code=config.trust_remote_code)
    except BaseException as error:  # includes a panic in the tokenizers library, which is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ConfigError(f"tokenizer: {_culprit(path)}: {type(error).__name__}: {error}") from error
    progress.advance()
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template, root)
    try:
        check_template(tokenizer, config.chat_template_timeout)
    except ValueError as error:
        where = f"tokenizer: the chat template in {path}" if config.chat_template is None else "chat_template:"
        raise ConfigError(f"{where} {error}") from error
    return tokenizer


def _culprit(path: Path) -> str:
    """Return the beginning of an error message, with the file because of which the tokenizer cannot be loaded."""
    main, settings = path / "tokenizer.json", path / "tokenizer_config.json"
    if not main.exists():
        return f"no loadable tokenizer in {path}"
    try:
        Tokenizer.from_file(str(main))
    except BaseException as error:  # includes panics, as above
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return f"{main} cannot be loaded"
    return f"{settings if settings.exists() else main} cannot be loaded"
