"""The first requests of a new user: the demo model without options, through `paged chat` and the OpenAI gateway."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import openai
import pytest

from paged_client import cli
from paged_client.serving.ports import choose_ports
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
CHATS_AT_ONCE = 25


class Served(NamedTuple):
    process: subprocess.Popen[str]
    grpc: str
    openai: str
    commands: list[str]  # that it suggests


@pytest.fixture(scope="module")
def served(demo_model) -> Iterator[Served]:
    """`paged serve demo`, as `make serve` starts it but for the ports."""
    names = ("http", "grpc", "metrics", "openai")
    ports = dict(zip(names, choose_ports(**dict.fromkeys(names, 0)), strict=True))
    flags = [f"--{name}-port={port}" for name, port in ports.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "paged_client", "serve", "demo", *flags],
        cwd=REPOSITORY_ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        lines = iter(process.stdout.readline, "")
        shown = []
        for line in lines:
            if line.startswith("Press Ctrl-C"):
                break
            shown.append(line.strip())
        assert shown, "the server has not started"
        yield Served(process, f"localhost:{ports['grpc']}", f"localhost:{ports['openai']}", shown[2:])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(WAIT)


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
def answers(served) -> dict[str, list[Answer]]:
    """The answers to each question, one for each seed. The command runs in this process, because starting it 50 times
    would take longer than the chats."""
    streams = {name: ThreadStream() for name in ("stdin", "stdout", "stderr")}

    def ask(question: str, seed: int) -> Answer:
        texts = {"stdin": io.StringIO(f"{question}\n"), "stdout": io.StringIO(), "stderr": io.StringIO()}
        for name, text in texts.items():
            streams[name].set(text)
        code = cli.main(["chat", "--url", served.grpc, "--seed", str(seed)])
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


def test_the_suggested_commands_work(served):
    """In another terminal, as they are printed."""
    assert ["paged chat" in served.commands[0], "/v1/chat/completions" in served.commands[1]] == [True, True]
    assert "/generate_stream" in served.commands[2]
    for command in served.commands:
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


def test_openai_package_reaches_the_gateway_of_paged_serve(served):
    client = openai.OpenAI(base_url=f"http://{served.openai}/v1", api_key="any", max_retries=0)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert [model.id for model in client.models.list()] == ["paged_llm"]
    (choice,) = client.chat.completions.create(model="paged_llm", messages=messages).choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"


def test_ctrl_c_lets_a_stream_of_the_gateway_finish(served):
    """Ends the server, so it is the last test."""
    client = openai.OpenAI(base_url=f"http://{served.openai}/v1", api_key="any", max_retries=0)
    more = {"ignore_eos": True}
    with client.completions.create(
        model="paged_llm", prompt="One, two,", max_tokens=40, stream=True, extra_body=more
    ) as stream:
        chunks = [next(stream)]
        served.process.send_signal(signal.SIGINT)
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    assert served.process.wait(WAIT) == 0
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
