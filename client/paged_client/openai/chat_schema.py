"""The schema of chat completion requests: messages, tools and tool choice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from paged_backend.text.conversation import media_problem
from paged_client.openai.errors import ApiError
from paged_client.openai.schema import ENGINE_UNSUPPORTED, GenerateBody, Integer, ListOf, StrictModel

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class CalledFunction(StrictModel):
    name: str
    arguments: str  # JSON text of an object


class ToolCall(StrictModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: str | None = None  # name of the author, passed to the chat template
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None
    # Fields of assistant messages in responses, which clients send back as history.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    def check(self, place: str) -> None:
        """Raises ApiError for fields that the role requires, or does not allow."""
        if self.tool_calls and self.role != "assistant":
            raise _wrong(f"{place}.tool_calls", f"is for the role assistant, not {self.role}")
        if self.content is None and not self.tool_calls:
            raise _wrong(f"{place}.content", "is missing")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise _wrong(f"{place}.tool_call_id", "is missing" if self.role == "tool" else "is for the role tool")


class Function(StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(GenerateBody):
    unsupported_fields: ClassVar = {
        **ENGINE_UNSUPPORTED,
        "functions": (None, []),
        "function_call": (None, "none"),
        "reasoning_effort": (None,),
        "modalities": (None, ["text"]),
        "audio": (None,),
    }

    messages: ListOf[ChatMessage]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's extension
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @classmethod
    def check_values(cls, values: Mapping[str, Any]) -> None:
        for index, message in _entries(values.get("messages")):
            content = message.get("content") if isinstance(message, dict) else None
            for number, part in _entries(content):
                if problem := media_problem(part):
                    raise _wrong(f"messages.{index}.content.{number}", problem)

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages):
            message.check(f"messages.{index}")
        if None not in (limits := (self.max_tokens, self.max_completion_tokens)) and len(set(limits)) > 1:
            raise _wrong("max_tokens", "differs from max_completion_tokens; leave one of the two out")
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "requires logprobs=true")
        self._check_tools([tool.function.name for tool in self.tools or ()])

    def _check_tools(self, names: Sequence[str]) -> None:
        seen: set[str] = set()
        for index, name in enumerate(names):
            if not _TOOL_NAME.fullmatch(name):
                raise _wrong(f"tools.{index}.function.name", "must be 1..64 letters, digits, '_', '-' or '.'")
            if name in seen:
                raise _wrong(f"tools.{index}.function.name", f"{name!r} is given twice")
            seen.add(name)
        if not names and self.tool_choice not in (None, "none"):
            raise _wrong("tool_choice", "requires tools")
        if not names and self.parallel_tool_calls is not None:
            raise _wrong("parallel_tool_calls", "requires tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise _wrong("tool_choice", f"{self.tool_choice.function.name[:80]!r} is not in tools")
        if self.may_call and self.response_format and self.response_format.type != "text":
            raise _wrong("response_format", "cannot be combined with tools; leave one of the two out")


def _entries(value: Any) -> Iterable[tuple[int, Any]]:
    """Return the numbered entries of a list, nothing for other values."""
    return enumerate(value) if isinstance(value, list) else ()


def _wrong(field: str, reason: str) -> ApiError:
    return ApiError(400, f"{field}: {reason}", param=field)
