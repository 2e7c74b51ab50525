"""Checks the files of a tokenizer, and its chat template. Needs no torch.

The libraries that load a tokenizer take seconds to import. They check everything else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged_backend.api.errors import ConfigError
from paged_backend.files.model_files import TEMPLATE, TOKENIZER, read_object

FAST = "tokenizer.json"
VOCABULARIES = ("vocab*", "*.model", "*.tiktoken", "*.tok", "tekken.json", "spm*", "tokenizer*")
BYTES = ("ByT5", "Canine", "Perceiver")  # tokenizers of bytes or characters, which have no vocabulary


def check_tokenizer(path: Path) -> None:
    """Raise ConfigError for a directory without a tokenizer, or with a damaged one."""
    if (path / FAST).is_file():
        _check_fast(path / FAST)
        return
    has_vocabulary = any(file.name != TOKENIZER for pattern in VOCABULARIES for file in path.glob(pattern))
    if not has_vocabulary and not str(_settings(path).get("tokenizer_class")).startswith(BYTES):
        raise ConfigError(f"{path}: no tokenizer: neither {FAST} nor a vocabulary exists")


def _settings(path: Path) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json; empty without the file."""
    return read_object(path / TOKENIZER) if (path / TOKENIZER).exists() else {}


def _check_fast(file: Path) -> None:
    """Raise ConfigError for an empty, truncated or unrelated file. The libraries parse it, which takes longer."""
    data = file.read_bytes().strip()
    if not (data.startswith(b"{") and data.endswith(b"}") and b'"model"' in data):
        problem = f"has {len(data)} bytes and" if len(data) < 100 else "is truncated or"
        raise ConfigError(f'{file}: {problem} is no JSON object with "model"')


def check_template(path: Path | None, given: str | None) -> None:
    """Raise ConfigError for a chat template that is not valid Jinja.

    path: the tokenizer. given: a template that replaces the tokenizer's own.
    """
    where = "chat_template:" if given else f"{path}: the chat template"
    for text in [given] if given else templates(path) if path and path.is_dir() else []:
        if isinstance(text, str) and (problem := syntax_problem(text)):
            raise ConfigError(f"{where} {problem}")


def templates(path: Path) -> list[Any]:
    """Return the templates of a tokenizer, from its template file or else from its settings. Raises ConfigError."""
    if (file := path / f"chat_template{TEMPLATE}").is_file():
        return [file.read_text(encoding="utf-8")]
    found = _settings(path).get("chat_template")
    if not isinstance(found, list):
        return [found]
    return [entry.get("template") for entry in found if isinstance(entry, dict)]


def syntax_problem(template: str) -> str | None:
    """Return why a chat template is not valid Jinja, or None if it is."""
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class Generation(Extension):
        """The tag by which templates mark what an assistant wrote, as transformers has it."""

        tags = {"generation"}  # noqa: RUF012 (as the base class has it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        Environment(extensions=[Generation, loopcontrols]).parse(template)
    except TemplateSyntaxError as error:
        return f"is not valid Jinja: line {error.lineno}: {error.message}"
    return None
