"""The schema of chat completion requests: messages, tools and tool choice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from paged_backend.text.conversation import media_problem
from paged_client.openai.errors import ApiError
from paged_client.openai.schema import ENGINE_UNSUPPORTED, Flag, GenerateBody, Integer, ListOf, StrictModel

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_ROLE = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # control tokens of models have other characters, too


class TextPart(StrictModel):
    place = "messages[].content[]."

    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledFunction(StrictModel):
    place = "messages[].tool_calls[].function."

    name: str
    arguments: str  # JSON text of an object


class ToolCall(StrictModel):
    place = "messages[].tool_calls[]."

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictModel):
    place = "messages[]."

    role: str  # a role that the chat template knows
    content: str | ListOf[TextPart] | None = None
    name: str | None = None  # name of the author, passed to the chat template
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as newer versions of vLLM call it
    function_call: None = None  # the older form of tool_calls

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def check(self, place: str) -> None:
        """Raises ApiError for an invalid role, and for fields that the role requires, or does not allow."""
        if not _ROLE.fullmatch(self.role):
            raise _wrong(f"{place}.role", "must be 1..64 letters, digits, '_' or '-'")
        if self.tool_calls and self.role != "assistant":
            raise _wrong(f"{place}.tool_calls", f"is for the role assistant, not {self.role}")
        if self.content is None and self.role != "assistant":  # an answer may be empty
            raise _wrong(f"{place}.content", "is missing")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise _wrong(f"{place}.tool_call_id", "is missing" if self.role == "tool" else "is for the role tool")


class Function(StrictModel):
    place = "tools[].function."

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    place = "tools[]."

    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    place = "tool_choice.function."

    name: str


class NamedTool(StrictModel):
    place = "tool_choice."

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    place = "tool_choice.allowed_tools."

    mode: Literal["auto", "required"]
    tools: ListOf[NamedTool]


class AllowedToolChoice(StrictModel):
    """Restricts the choice to some of the tools, without a change of `tools`."""

    place = "tool_choice."

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[NamedTool | AllowedToolChoice, Field(discriminator="type")]


_TEMPLATE_FIELDS = ("reasoning_effort", "add_generation_prompt", "continue_final_message")


class ChatRequest(GenerateBody):
    unsupported_fields: ClassVar = {
        **ENGINE_UNSUPPORTED,
        "functions": (None, []),
        "function_call": (None, "none"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "chat_template": (None,),  # it would run here, with the memory of this process
    }

    messages: ListOf[ChatMessage]
    max_completion_tokens: Integer | None = None
    logprobs: Flag | None = None
    top_logprobs: Integer | None = None
    reasoning_effort: str | None = None  # for templates that read it
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    # vLLM's extensions
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    include_reasoning: Flag | None = None  # whether the response has the reasoning; true by default
    echo: Flag | None = None  # the answer begins with the message that it continues

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables for the chat template."""
        own = {name: getattr(self, name) for name in _TEMPLATE_FIELDS}
        return {name: value for name, value in own.items() if value is not None} | (self.chat_template_kwargs or {})

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
        if self.top_logprobs and not self.logprobs:
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
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise _wrong("tool_choice", "requires tools")
        for chosen in chosen_tools(self.tool_choice):
            if chosen not in seen:
                raise _wrong("tool_choice", f"{chosen[:80]!r} is not in tools")


def chosen_tools(choice: object) -> list[str]:
    """Return the names in a tool choice."""
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    return [tool.function.name for tool in choice.allowed_tools.tools] if isinstance(choice, AllowedToolChoice) else []


def _entries(value: Any) -> Iterable[tuple[int, Any]]:
    """Return the numbered entries of a list, nothing for other values."""
    return enumerate(value) if isinstance(value, list) else ()


def _wrong(field: str, reason: str) -> ApiError:
    return ApiError(400, f"{field}: {reason}", param=field)
