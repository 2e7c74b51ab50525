"""Checks the model's chat template when the model is loaded, and renders prompts with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.files.tokenizer_files import syntax_problem
from paged_backend.text import chat_templates
from paged_backend.text.chat_templates import TemplateRefusal, TemplateTimeout
from paged_backend.text.conversation import Message, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TEMPLATE_CHARS = 1 << 20


NO_TEMPLATE = (
    "this model has no chat template; use text_input (paged generate), or start the server with --chat-template FILE"
)


def check_template(tokenizer: PreTrainedTokenizerBase, seconds: float) -> None:
    """Raise ValueError for a template that is too large, is not valid Jinja, or does not terminate on a short prompt.

    A template that rejects the short prompt is accepted: some need two turns, or a system message.
    """
    for text in (templates := chat_templates.sources(tokenizer)):
        if not isinstance(text, str) or len(text) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"must be a text of at most {MAX_TEMPLATE_CHARS} characters")
        if problem := syntax_problem(text):
            raise ValueError(problem)
    if not templates:
        return
    try:
        chat_templates.apply(tokenizer, [{"role": "user", "content": "Hello"}], None, seconds=seconds)
    except TemplateTimeout as error:
        raise ValueError(f"{error} (chat_template_timeout)") from error
    except Exception:
        return


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[Tool] | None,
    seconds: float,
    variables: dict[str, Any] | None = None,
) -> str:
    """Return the prompt for the messages, rendered with the model's chat template.

    Raises RequestError if the model has no template, or if the template rejects the messages or exceeds `seconds`.
    """
    if not tokenizer.chat_template:
        raise _invalid(NO_TEMPLATE)
    try:
        return chat_templates.render(tokenizer, messages, tools, variables=variables, seconds=seconds)
    except TemplateTimeout as error:
        raise _invalid(f"the chat template {error} on them (chat_template_timeout)") from error
    except TemplateRefusal as error:
        raise _invalid(str(error)) from error


def _invalid(reason: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, f"messages: {reason}")
