"""Recorded outputs of model families, in the form of each family's chat template, on one server.

Each family is a model of its own. The name of a script in the last message selects what the model plays.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_client.serving.server_files import REPOSITORY_ROOT
from paged_client.serving.tritonserver import TritonServer
from tests.support.scripted_model import CHATML, save_scripted
from tests.support.triton import MODEL, ONE_AT_A_TIME

OPTIONS = {"dtype": "float32", "num_gpu_blocks_override": 512, "max_num_seqs": 8, "first_response_ms": -1}
THOUGHT = "The user asks for the weather, so I call the tool."
ANSWER = "It is sunny in Paris."


@dataclass(frozen=True)
class Family:
    scripts: dict[str, str]
    template: str = ""  # a comment in the chat template, with the marks of the family
    special: tuple[str, ...] = ()
    eos: str = "<|im_end|>"


def _hermes(*cities: str) -> str:
    calls = [json.dumps({"name": "get_weather", "arguments": {"city": city}}) for city in cities]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def _harmony(channel: str, text: str) -> str:
    return f"<|channel|>{channel}<|message|>{text}"


_THINKING = f"<think>\n{THOUGHT}\n</think>\n\n"
_BASH = json.dumps({"name": "Bash", "arguments": {"command": "ls", "description": "List files"}})
_SHELL = json.dumps({"name": "shell", "arguments": {"command": ["bash", "-lc", "ls"]}})

FAMILIES = {
    "qwen3": Family(
        {
            "one-call": _hermes("Paris"),
            "two-calls": "Both cities.\n" + _hermes("Paris", "Rome"),
            "thinking-answer": _THINKING + ANSWER,
            "thinking-call": _THINKING + _hermes("Paris"),
            "cut-call": '<tool_call>\n{"name": "get_weather", "argum',
            "plain-answer": ANSWER,
            "play-bash": f"I look at the files.\n<tool_call>\n{_BASH}\n</tool_call>",
            "play-shell": _THINKING + f"<tool_call>\n{_SHELL}\n</tool_call>",
        },
        "enable_thinking <think> </think> <tool_call>",
    ),
    "coder": Family(
        {
            "one-call": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
            "</tool_call>",
            "plain-answer": ANSWER,
        },
        "<tool_call> <function=name> <parameter=name>",
    ),
    "r1": Family({"thinking-answer": f"{THOUGHT}\n</think>\n\n{ANSWER}"}, "<think> </think>"),
    "llama": Family(
        {
            "one-call": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
            "marked-call": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
            "plain-answer": ANSWER,
        },
        '<|python_tag|> {"name": function name, "parameters": dictionary of arguments}',
        ("<|python_tag|>",),
        "<|eot_id|>",
    ),
    "mistral": Family(
        {
            "one-call": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
            "plain-answer": ANSWER,
        },
        "[AVAILABLE_TOOLS] [TOOL_CALLS]",
        ("[TOOL_CALLS]",),
        "</s>",
    ),
    "gpt-oss": Family(
        {
            "one-call": _harmony("analysis", THOUGHT)
            + "<|end|><|start|>assistant"
            + _harmony("commentary to=functions.get_weather <|constrain|>json", '{"city": "Paris"}'),
            "thinking-answer": _harmony("analysis", THOUGHT) + "<|end|><|start|>assistant" + _harmony("final", ANSWER),
        },
        "<|channel|>analysis<|message|>",
        ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        "<|call|>",
    ),
}


@contextmanager
def scripted_server(directory: Path, *names: str) -> Iterator[TritonServer]:
    """Run a server of these families: the first is MODEL, every other has its own name."""
    for name in names:
        family = FAMILIES[name]
        marks = f"{{# {family.template} #}}"
        save_scripted(
            directory / name, family.scripts, chat_template=CHATML + marks, special=family.special, eos=family.eos
        )
    repository = directory / "models"
    for name in (MODEL, *names[1:]):
        copied = shutil.copytree(
            REPOSITORY_ROOT / "model_repository" / MODEL,
            repository / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        config = copied / "config.pbtxt"
        config.write_text(re.sub(f'^name: "{MODEL}"', f'name: "{name}"', config.read_text(), flags=re.MULTILINE))
        settings: dict[str, Any] = OPTIONS | {"model": str(directory / name)}
        (copied / "1" / "model.json").write_text(json.dumps(settings))
    options = OPTIONS | {"min_priority": 0}
    with TritonServer(directory / names[0], options, repository=repository, server_args=[ONE_AT_A_TIME]) as server:
        yield server
