"""The marks that models write around their reasoning, found in the chat template."""

from __future__ import annotations

from typing import NamedTuple


class ReasoningMarks(NamedTuple):
    """The texts before and after reasoning in a model's output."""

    begin: str
    end: str


# The marks of model families, by their usual names: of qwen3 and deepseek_r1, mistral, seed_oss, gpt_oss.
MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>"),
)


def reasoning_marks(chat_template: str | None) -> ReasoningMarks | None:
    """Return the marks in a chat template, or None if it has none. A template has the end mark at least."""
    template = chat_template or ""
    if "<|channel|>" in template:
        return MARKS[-1]
    return next((marks for marks in MARKS if marks.end in template), None)
