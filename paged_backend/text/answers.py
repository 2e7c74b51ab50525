"""Splits a model's output into its reasoning, its answer and its tool calls, as it arrives.

The tokenizer's `response_template` says how the model marks them; transformers has the parser. If a tokenizer has none,
a template is made of the marks that the chat template has.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser, parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from paged_backend.api.errors import ErrorCode, RequestError, is_utf8_text
from paged_backend.text import chat_templates
from paged_backend.text.reasoning import MARKS, ReasoningMarks, reasoning_marks
from paged_backend.text.tokenizing import decoder

TEXT, REASONING, CALLS = "text_output", "reasoning_content", "tool_calls"  # names of the output tensors
ANSWER_PARTS = frozenset((REASONING, CALLS))  # what can be taken out of the text
_REASONING_FIELDS = (REASONING, "reasoning", "thinking")  # names in response templates
_DELIMITERS = ("open", "open_pattern", "close", "close_pattern")
_OPENINGS = frozenset(_DELIMITERS[:2])
_NAMED_GROUP = re.compile(r"\(\?P<\w+>")

_CALL = {"type": "function", "function": "{content}"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_JSON_CALLS = {  # of hermes and qwen
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": _CALL,
}
_CHANNELS = {  # of gpt_oss
    REASONING: {"open": MARKS[-1].begin, "close": MARKS[-1].end},
    CALLS: {
        "open_pattern": r"<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w.-]+)"
        r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
        "close": "<|call|>",
        "repeats": True,
        "content": "json",
        "transform": _NAMED_CALL,
    },
    "content": {"close_pattern": r"<\|start\|>assistant|<\|channel\|>(?:final|commentary)<\|message\|>|<\|end\|>"},
}

_TAIL = 64  # tokens at the end of a prompt that usually have the beginning of the answer

log = logging.getLogger("paged_llm")


class Parts(NamedTuple):
    """New output, by what it is part of."""

    text: str = ""
    reasoning: str = ""
    calls: Sequence[dict[str, Any]] = ()


class AnswerFormat:
    """How a model marks the parts of its output."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        chat_template = "\n".join(chat_templates.sources(tokenizer))
        self._tokenizer = tokenizer
        self._marks = reasoning_marks(chat_template)
        self._spec = _own_template(tokenizer) or _made_template(tokenizer, chat_template, self._marks)
        self._splitters: dict[frozenset[str], Splitter | None] = {}

    def check(self, outputs: Collection[str]) -> None:
        """Raise RequestError if tool calls are asked for and the model's format of them is not known."""
        if CALLS in outputs and not (self._spec and CALLS in self._spec["fields"]):
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                "return_tool_calls=true: the tokenizer has no response_template with tool_calls, and the chat template"
                " has none of the formats that are known without one; calls are part of text_output",
            )

    def splitter(self, outputs: Collection[str]) -> Splitter | None:
        """Return what takes these of ANSWER_PARTS out of the text; None if the model marks none of them."""
        asked = ANSWER_PARTS.intersection(outputs)
        if asked not in self._splitters:
            spec = self._spec or {"fields": {}}
            wanted = frozenset(name for name in spec["fields"] if _output(name) in asked)
            self._splitters[asked] = Splitter(self._tokenizer, spec, wanted, self._marks) if wanted else None
        return self._splitters[asked]


class Splitter:
    """Takes some parts out of the text of one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        spec: Mapping[str, Any],
        wanted: Collection[str],
        marks: ReasoningMarks | None,
    ):
        """spec: the response template. wanted: its fields that are taken out."""
        fields = spec["fields"]
        # Other fields are left in the text, if the template has a field for the text outside of marks.
        has_rest = any(not _OPENINGS & field.keys() for field in fields.values())
        kept = [name for name in fields if name in wanted or _output(name) == TEXT or not has_rest]
        regions = {name: _region(fields[name]) for name in kept}
        anchor = {name: value for name, value in spec.items() if name.startswith("start_anchor")}
        self.wanted, self.template = wanted, load_response_template(dict(spec))
        # Without the parsers of values: one of them would fail for an invalid call, and lose the output after it.
        self.regions = load_response_template({**anchor, "fields": regions})
        self._tokenizer = tokenizer
        self._marks = marks
        delimiters = json.dumps(list(regions.values()), ensure_ascii=False).replace(r"\\", "\\")
        decode = decoder(tokenizer, False)
        special = {index: decode([index]) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._hidden = {
            index for index, text in special.items() if text not in delimiters and re.escape(text) not in delimiters
        }

    def decoder(self, skip_special_tokens: bool) -> Callable[[list[int]], str]:
        """Return a function from token ids to their text, which has the special tokens that are marks."""
        decode, hidden = decoder(self._tokenizer, False), self._hidden if skip_special_tokens else ()
        return lambda ids: decode([token for token in ids if token not in hidden])

    def start(self, prompt: Sequence[int]) -> str:
        """Return the part of the prompt that is the beginning of the answer, such as a mark before reasoning."""
        decode, text = decoder(self._tokenizer, False), ""
        for count in (_TAIL, len(prompt)):
            text = decode(list(prompt[-count:]))
            if anchors := list(self.regions.start_anchor_re.finditer(text)):
                return text[anchors[-1].end() :]
        return self._marks.begin if self._marks and text.rstrip().endswith(self._marks.begin) else ""


class AnswerParser:
    """Splits the text of one sample."""

    def __init__(self, splitter: Splitter, start: str, tools: Sequence[dict[str, Any]] | None):
        """start: what `Splitter.start` returns. tools: of the request; arguments get the types of their parameters."""
        self._splitter = splitter
        self._tools = list(tools or ())
        self._parser = ResponseParser(splitter.regions, prefix=start)
        self._raw = start  # text that has not been returned, with marks
        self._collected = ""  # text of the open region
        self._is_new = True  # whether no text has followed the beginning of reasoning
        self._spaces = ""  # at the end of the reasoning so far
        self._had_region = False  # whether a region has ended
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self._take(self._parser.initial_events)
        for part in (self.text, self.reasoning, self.calls):
            part.clear()

    @property
    def message(self) -> dict[str, Any]:
        """The fields of a message with all of the output."""
        fields = {"content": "".join(self.text), REASONING: "".join(self.reasoning), CALLS: self.calls}
        return {name: value for name, value in fields.items() if value or name == "content"}

    def push(self, text: str) -> Parts:
        """Add text, and return the output that it completes."""
        self._raw += text
        return self._take(self._parser.feed(text))

    def finish(self) -> Parts:
        """End the text, and return the rest of the output."""
        return self._take(self._parser.finalize()[1])

    def _take(self, events: Sequence[Mapping[str, Any]]) -> Parts:
        before = len(self.text), len(self.reasoning), len(self.calls)
        for event in events:
            field, output = event["field"], _output(event["field"])
            is_collected = output != TEXT and (output != REASONING or field not in self._splitter.wanted)
            match event["type"]:
                case "region_open":
                    self._collected, self._is_new = "", True
                case "region_chunk" if is_collected:
                    self._collected += event["text"]
                case "region_chunk":
                    self._raw = self._raw.partition(event["text"])[2]
                    (self._add_reasoning if output == REASONING else self._add_text)(event["text"])
                case "region_close" if output != TEXT:
                    if is_collected:
                        self._close(field)
                    self._had_region = True
        text, reasoning = "".join(self.text[before[0] :]), "".join(self.reasoning[before[1] :])
        return Parts(text, reasoning, self.calls[before[2] :])

    def _add_text(self, text: str) -> None:
        """Add text to the answer, without space between a region and its beginning."""
        if self._had_region and not self.text:
            text = text.lstrip()
        if text:
            self.text.append(text)

    def _add_reasoning(self, text: str) -> None:
        """Add text to the reasoning, without space at both ends of a region."""
        if self._is_new:
            text = text.lstrip()
            if not text:
                return
            self._is_new, self._spaces = False, "\n" if self.reasoning else ""
        text = self._spaces + text
        shown = text.rstrip()
        self._spaces = text[len(shown) :]
        if shown:
            self.reasoning.append(shown)

    def _close(self, field: str) -> None:
        """Add the calls of a region. A region that has none, or that was not asked for, is text."""
        whole = self._whole_region(field)
        calls = self._read_calls(whole) if field == CALLS and field in self._splitter.wanted else []
        self.calls += calls
        if not calls:
            self._add_text(whole)

    def _whole_region(self, name: str) -> str:
        """Return the text of the last region with its marks."""
        field, raw = self._splitter.regions.fields[name], self._raw
        for opening in field.open_re.finditer(raw):
            end = opening.end() + len(self._collected)
            if raw[opening.end() : end] == self._collected:
                closing = field.close_re and field.close_re.match(raw, end)
                end = closing.end() if closing else end
                self._raw = raw[end:]
                return raw[opening.start() : end]
        return self._collected

    def _read_calls(self, region: str) -> list[dict[str, Any]]:
        """Return the calls in the text of a region; none if one is invalid, or not complete."""
        try:
            value = parse_response(region, self._splitter.template, prefix="", tools=self._tools)[CALLS]
            return [_checked(call) for call in _flat(value)]
        except Exception as error:  # the template may be for any text, and the model may have written any
            log.info("a tool call is returned as text: %s: %s", type(error).__name__, error)
            return []


def _checked(call: Any) -> dict[str, Any]:
    """Return a call in the form of an assistant's message. Raises an exception if it is not one."""
    name, arguments = call["function"]["name"], call["function"].get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    checked = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    text = json.dumps(checked, ensure_ascii=False, allow_nan=False)
    if not (isinstance(name, str) and name and isinstance(arguments, dict | None) and is_utf8_text(text)):
        raise ValueError("must have a name, and an object as arguments")
    return checked


def _flat(value: Any) -> list[Any]:
    return [item for part in value for item in _flat(part)] if isinstance(value, list) else [value]


def _output(field: str) -> str | None:
    """Return the output that a field of a response template is for."""
    if field in _REASONING_FIELDS:
        return REASONING
    return {CALLS: CALLS, "content": TEXT}.get(field)


def _region(field: Mapping[str, Any]) -> dict[str, Any]:
    """Return the marks of a field, without names of groups, which need a field that has a use for them."""
    return {
        key: _NAMED_GROUP.sub("(?:", value) if key.endswith("_pattern") else value
        for key, value in field.items()
        if key in _DELIMITERS
    }


def _own_template(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any] | None:
    """Return the tokenizer's response template; None if it has none, or an invalid one."""
    spec = getattr(tokenizer, "response_template", None)
    try:
        if spec is not None:
            load_response_template(spec)
            load_response_template({**spec, "fields": {name: _region(field) for name, field in spec["fields"].items()}})
    except ValueError as error:
        log.warning("the tokenizer's response_template is not used: %s", error)
        return None
    return spec


def _made_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str, marks: ReasoningMarks | None
) -> Mapping[str, Any] | None:
    """Return a response template for the marks in a chat template; None if it has none that are known."""
    fields: dict[str, Any] = {}
    if marks == MARKS[-1]:
        fields = _CHANNELS
    elif marks:
        fields[REASONING] = {"open": marks.begin, "close": marks.end}
    if "<tool_call>" in chat_template and "<function=" not in chat_template:
        fields[CALLS] = _JSON_CALLS
    if not fields:
        return None
    begins = _answer_begin(tokenizer)
    for mark in marks or ():
        begins = begins.partition(mark)[0]
    anchor = {"start_anchor": begins} if begins.strip() else {"start_anchor_pattern": "(?!)"}
    return {**anchor, "fields": {"content": {}, **fields}}


def _answer_begin(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the chat template writes before an answer; empty if it cannot be found."""
    messages = [{"role": "user", "content": "Hello"}]
    try:
        whole = chat_templates.apply(tokenizer, messages, None)
        without = chat_templates.apply(tokenizer, messages, None, variables={"add_generation_prompt": False})
    except Exception as error:  # whatever a template raises
        log.info("the beginning of answers is unknown: %s: %s", type(error).__name__, error)
        return ""
    return whole[len(without) :] if whole.startswith(without) else ""
