"""The chat template of a tokenizer's directory, applied in the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from client.openai.errors import ApiError

Message = dict[str, Any]


class ChatTemplate:
    """Turns a conversation into the prompt that the server tokenizes as it is.

    Raises ValueError for a directory without a tokenizer or a chat template.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory}: no tokenizer: {error}") from None
        if not self._tokenizer.chat_template:
            raise ValueError(f"{directory}: the tokenizer has no chat template")

    @property
    def text(self) -> str:
        """The template itself."""
        return str(self._tokenizer.chat_template)

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """Raises ApiError where the template refuses the conversation."""
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            )
        except Exception as error:  # templates refuse, for example, two user turns in a row, or trip over odd values
            reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ApiError(400, f"messages: the chat template refuses them: {reason}", param="messages") from error
