"""Load the tokenizer of a model, and check its chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.files import model_files
from paged_backend.files.model_files import GGUF
from paged_backend.files.start_checks import read_template
from paged_backend.loading.model_source import find_files, source_arguments
from paged_backend.text.templates import check_template
from paged_backend.utils.startup import Progress


def load_tokenizer(config: EngineConfig, root: Path, model_path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the options name, or that of the model. Raises ConfigError."""
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
