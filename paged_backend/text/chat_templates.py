"""Chat templates, applied to what clients send: by the engine, and by the gateway where it has one of its own.

Templates run in Jinja's sandbox, and on a thread that is ended past its time: one may loop over what a client sent as
often as it likes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDER_SECONDS = 2.0  # the demo model's template takes 0.05 s for megabytes of text


class TemplateTimeout(Exception):
    """A template that has not ended in time."""


class TemplateRefusal(Exception):
    """Why a template makes no prompt of a conversation."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    seconds: float = RENDER_SECONDS,
) -> str:
    """The prompt that the tokenizer's chat template makes. seconds: that it may take. Raises TemplateTimeout, and
    TemplateRefusal: templates refuse, for example, two user turns in a row, or trip over odd values."""
    from jinja2 import TemplateError  # as late as transformers does

    try:
        return apply(tokenizer, messages, tools, seconds=seconds)
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
    seconds: float = RENDER_SECONDS,
) -> str:
    """As `render`, but raises what the template does."""

    def call() -> str:
        given = {"tools": list(tools) if tools else None, "tokenize": False, "add_generation_prompt": True}
        return str(tokenizer.apply_chat_template(list(messages), **given))

    return _Rendering(call).result(seconds)


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

    def result(self, seconds: float) -> str:
        """Raises TemplateTimeout, or what the call raised."""
        self.start()
        self.join(seconds)
        with self._lock:
            if not self._done:
                thread = ctypes.c_ulong(self.ident or 0)
                # With SystemExit it ends without a word, as soon as it is in Python code.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))
                raise TemplateTimeout(f"does not end within {seconds:g} s")
        if self._error:
            raise self._error
        assert self._text is not None
        return self._text
