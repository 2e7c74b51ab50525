"""Applies the chat template of a tokenizer directory in the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged_backend.api.errors import RequestError
from paged_backend.api.limits import InputLimits
from paged_backend.text import chat_templates
from paged_backend.text.chat_templates import TemplateRefusal, TemplateTimeout
from paged_backend.text.conversation import check_template_variables
from paged_client.openai.errors import ApiError, from_engine
from paged_client.types import PagedError

Message = dict[str, Any]


class ChatTemplate:
    """Renders conversations to prompts, which the server then tokenizes without a template.

    Args:
        directory: Hugging Face directory of the tokenizer.
        seconds: time limit for rendering a conversation.

    Raises ValueError for a directory without a tokenizer or a chat template.
    """

    def __init__(self, directory: Path, seconds: float = chat_templates.RENDER_SECONDS) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory}: no tokenizer: {error}") from None
        if not self._tokenizer.chat_template:
            raise ValueError(f"{directory}: the tokenizer has no chat template")
        self._seconds = seconds

    @property
    def text(self) -> str:
        """The source of the template."""
        return str(self._tokenizer.chat_template)

    def prompt(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Render a conversation, with further `variables` for the template (`chat_template_kwargs`).

        Raises ApiError for reserved variables, and if the template rejects the conversation or exceeds the time limit.
        """
        try:
            given = check_template_variables(variables or {}, InputLimits())
            return chat_templates.render(self._tokenizer, messages, tools, variables=given, seconds=self._seconds)
        except RequestError as error:
            raise from_engine(PagedError.parse(str(error)), {}) from None
        except TemplateTimeout as error:
            reason = f"the chat template {error} on them (--chat-template-timeout)"
        except TemplateRefusal as error:
            reason = str(error)
        raise ApiError(400, f"messages: {reason}", param="messages")
