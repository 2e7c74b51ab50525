"""The model's chat template, applied to what clients send. Templates run in Jinja's sandbox, and on a thread that is
ended past its time: one may loop over what a client sent as often as it likes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from paged_backend.errors import ErrorCode, RequestError
from paged_backend.frontend.conversation import Message, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TEMPLATE_CHARS = 1 << 20
RENDER_SECONDS = 2.0  # while nobody else is let in; the demo model's takes 0.05 s for megabytes of text


class TemplateTimeout(Exception):
    """A template that has not ended in time."""


class _Rendering(threading.Thread):
    """One call on a thread of its own, so that it can be ended and nothing else with it."""

    def __init__(self, call: Callable[[], str]):
        super().__init__(name="template", daemon=True)
        self._call = call
        self._lock = threading.Lock()  # while it is held the thread's number is the thread's
        self._done = False
        self._text: str | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._text = self._call()
        except SystemExit:  # it was ended
            pass
        except Exception as error:
            self._error = error
        finally:
            with self._lock:
                self._done = True

    def result(self) -> str:
        """Raises TemplateTimeout, or what the call raised."""
        self.start()
        self.join(RENDER_SECONDS)
        with self._lock:
            if not self._done:
                thread = ctypes.c_ulong(self.ident or 0)
                # With SystemExit it ends without a word, as soon as it is in Python code.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))
                raise TemplateTimeout(f"does not end within {RENDER_SECONDS:g} s")
        if self._error:
            raise self._error
        assert self._text is not None
        return self._text


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a template that is too large, is no Jinja, or does not end with a short conversation. That
    it refuses one says nothing: some do, unless there are two turns, or a system's."""
    from jinja2 import TemplateSyntaxError  # as late as transformers does

    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template] if template else []:
        if not isinstance(text, str) or len(text) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"must be a text of at most {MAX_TEMPLATE_CHARS} characters")
    if not template:
        return
    try:
        _apply(tokenizer, [{"role": "user", "content": "Hello"}], None)
    except TemplateSyntaxError as error:
        raise ValueError(f"is not valid Jinja: line {error.lineno}: {error.message}") from error
    except TemplateTimeout as error:
        raise ValueError(str(error)) from error
    except Exception:
        return


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Tool] | None) -> str:
    """The prompt that the model's chat template makes. Raises RequestError where there is none, or where it refuses, or
    does not end."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise _refused("this model has no chat template; use text_input")
    try:
        return _apply(tokenizer, messages, tools)
    except TemplateTimeout as error:
        raise _refused(f"the chat template {error} on them") from error
    except Exception as error:  # templates refuse, for example, two user turns in a row, or trip over odd values
        reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise _refused(f"the chat template refuses them: {reason}") from error


def _apply(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Tool] | None) -> str:
    def call() -> str:
        return str(
            tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
        )

    return _Rendering(call).result()


def _refused(reason: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, f"messages: {reason}")
