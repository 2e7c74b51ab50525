"""The first requests of a new user: the demo model without options, through `paged chat` and the OpenAI gateway."""

import io
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import openai
import pytest

from paged_client import cli
from paged_client.serving.server_files import REPOSITORY_ROOT
from tests.support.waiting import WAIT

QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "How many legs does a spider have?": "8",
    "How many days are in a week?": "7",
    "What color is the sky on a clear day?": "blue",
}
SEEDS = range(10)
CHATS_AT_ONCE = 50


def _environment() -> dict[str, str]:
    path = [REPOSITORY_ROOT, REPOSITORY_ROOT / "kernels", REPOSITORY_ROOT / "client"]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}


class ThreadStream:
    """Standard input or output of a process in which each thread has its own."""

    def __init__(self) -> None:
        self._own = threading.local()

    def set(self, stream: io.StringIO) -> None:
        self._own.stream = stream

    def __getattr__(self, name):
        return getattr(self._own.stream, name)


class Answer(NamedTuple):
    code: int
    text: str
    errors: str


@pytest.fixture(scope="module")
def answers(demo_server) -> dict[str, list[Answer]]:
    """The answers to each question, one for each seed. The command runs in this process, because starting it 50 times
    would take longer than the chats."""
    streams = {name: ThreadStream() for name in ("stdin", "stdout", "stderr")}

    def ask(question: str, seed: int) -> Answer:
        texts = {"stdin": io.StringIO(f"{question}\n"), "stdout": io.StringIO(), "stderr": io.StringIO()}
        for name, text in texts.items():
            streams[name].set(text)
        code = cli.main(["chat", "--url", demo_server.grpc_url, "--seed", str(seed)])
        return Answer(code, texts["stdout"].getvalue(), texts["stderr"].getvalue())

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(CHATS_AT_ONCE) as pool:
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        asked = {question: [pool.submit(ask, question, seed) for seed in SEEDS] for question in QUESTIONS}
        return {question: [one.result() for one in futures] for question, futures in asked.items()}


@pytest.mark.parametrize(("question", "right"), QUESTIONS.items())
def test_the_demo_model_answers_simple_questions(answers, question, right):
    """With any seed, and the answer ends."""
    found = answers[question]
    assert len([one for one in found if right in one.text]) >= 0.9 * len(SEEDS), found
    assert [one for one in found if one.code or one.errors] == [], "a note on standard error says that it was cut"


def test_the_suggested_commands_work(demo_server):
    """In another terminal, as they are printed."""
    commands = [line.strip() for line in demo_server.output.splitlines()[2:-1]]
    assert ["paged chat" in commands[0], "/v1/chat/completions" in commands[1]] == [True, True]
    assert "/generate_stream" in commands[2]
    for command in commands:
        done = subprocess.run(
            ["bash", "-euc", command.replace("curl ", "curl --fail ")],
            cwd=REPOSITORY_ROOT,
            env=_environment(),
            input="What is the capital of France?\n",
            stdout=subprocess.PIPE,
            text=True,
            timeout=WAIT,
            check=True,
        )
        assert "Paris" in done.stdout, command


def test_openai_package_reaches_the_gateway_of_paged_serve(demo_server):
    client = openai.OpenAI(base_url=f"http://{demo_server.openai_url}/v1", api_key="any", max_retries=0)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert [model.id for model in client.models.list()] == ["paged_llm"]
    (choice,) = client.chat.completions.create(model="paged_llm", messages=messages).choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
