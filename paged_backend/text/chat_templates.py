"""Renders chat templates for the engine, and for the OpenAI gateway if it has a template of its own.

Templates run in Jinja's sandbox, on a thread that is ended at its time limit, because a template may loop forever over
the client's input.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDER_SECONDS = 2.0  # time limit; the demo model's template takes 0.05 s for megabytes of text


class TemplateTimeout(Exception):
    """The template did not finish within its time limit."""


class TemplateRefusal(Exception):
    """The template rejected the messages; the text says why."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    variables: Mapping[str, Any] | None = None,
    seconds: float = RENDER_SECONDS,
) -> str:
    """Return the prompt for the messages, rendered with the tokenizer's chat template.

    variables: further variables for the template (`chat_template_kwargs`).

    Raises TemplateTimeout after `seconds`, and TemplateRefusal if the template raises: many reject two user turns in a
    row, or fail on unexpected values.
    """
    from jinja2 import TemplateError  # imported here because transformers imports it late as well

    try:
        return apply(tokenizer, messages, tools, variables=variables, seconds=seconds)
    except TemplateTimeout:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise TemplateRefusal(f"the chat template refuses them: {reason}") from error


def apply(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    variables: Mapping[str, Any] | None = None,
    seconds: float = RENDER_SECONDS,
) -> str:
    """Like `render`, but raises the template's own errors instead of TemplateRefusal."""

    def call() -> str:
        own = dict(variables or {})
        given = {"tools": list(tools) if tools else None, "tokenize": False}
        given["add_generation_prompt"] = not own.get("continue_final_message", False)
        return str(tokenizer.apply_chat_template(list(messages), **(given | own)))

    return _Rendering(call).result(seconds)


def sources(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of a tokenizer's chat templates, which may be several with names; empty without one."""
    template = tokenizer.chat_template
    return list(template.values()) if isinstance(template, dict) else [template] if template else []


def default_source(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the text of the chat template for conversations without tools; None without one."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


class _Rendering(threading.Thread):
    """Runs one call on a separate thread, which can be ended without affecting anything else."""

    def __init__(self, call: Callable[[], str]):
        super().__init__(name="template", daemon=True)
        self._call = call
        self._lock = threading.Lock()  # while held, the thread has not ended, so `ident` is valid
        self._done = False
        self._text: str | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._text = self._call()
        except SystemExit:  # raised by `result`
            pass
        except Exception as error:
            self._error = error
        finally:
            with self._lock:
                self._done = True

    def result(self, seconds: float) -> str:
        """Return the result of the call. Raises TemplateTimeout, or what the call raised."""
        self.start()
        self.join(seconds)
        with self._lock:
            if not self._done:
                thread = ctypes.c_ulong(self.ident or 0)
                # SystemExit ends the thread without a traceback, as soon as it executes Python code.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))
                raise TemplateTimeout(f"does not end within {seconds:g} s")
        if self._error:
            raise self._error
        assert self._text is not None
        return self._text
