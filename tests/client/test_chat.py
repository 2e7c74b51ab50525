"""`paged chat` on a pseudo-terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.support.client_calls import SAY
from tests.support.fake_servers import WAIT

ROOT = Path(__file__).parents[2]


class Terminal:
    """A `paged chat` on a pseudo-terminal."""

    def __init__(self, flags, directory):
        self._master, slave = pty.openpty()
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "client")])
        environment = os.environ | {"PYTHONPATH": path, "PAGED_CACHE_DIR": str(directory), "TERM": "dumb"}
        command = [sys.executable, "-m", "paged_client", "chat", *flags]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text):
        os.write(self._master, text.encode())

    def wait_for(self, text):
        """Read until `text` is shown after what was read before. Return all that was shown until then."""
        deadline = time.monotonic() + WAIT
        while text not in self.seen:
            assert select.select([self._master], [], [], max(0, deadline - time.monotonic()))[0], self.seen
            self.seen += os.read(self._master, 4096).decode().replace("\r\n", "\n")
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt_prompt(self):
        """Press Ctrl-C at the prompt, once the process waits for input.

        readline shows its prompt before it waits, and a signal in between has no effect until the next key.
        """
        stat, asleep = Path(f"/proc/{self.process.pid}/stat"), 0
        while asleep < 10:
            asleep = asleep + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
            time.sleep(0.02)
        self.type("\x03")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def _own_terminal():
    """Make the pseudo-terminal the controlling one, so that Ctrl-C is a signal, which jobs in the background ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def chat(grpc_fake, tmp_path):
    """A function that starts a chat with further flags."""
    started = []

    def start(*flags):
        started.append(Terminal([*grpc_fake.flags, *flags], tmp_path))
        started[-1].wait_for("> ")
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()


def messages(fake, number):
    return [message["content"] for message in json.loads(fake.seen.requests[number]["messages"])]


def test_banner_names_model_and_commands(grpc_fake, tmp_path):
    terminal = Terminal(grpc_fake.flags, tmp_path)
    banner = terminal.wait_for("> ")
    assert f"paged_llm at {grpc_fake.seen.url}. /help lists the commands, Ctrl-C stops a reply, Ctrl-D exits." in banner
    terminal.type("\x04")
    assert terminal.process.wait(WAIT) == 0
    terminal.close()


def test_commands(chat, grpc_fake):
    terminal = chat("-p", SAY)
    terminal.type("/help\n")
    assert "/set NAME VALUE" in terminal.wait_for("\n> ")
    terminal.type("one\n")
    terminal.wait_for("Hello there\n> ")
    terminal.type("two\n")
    terminal.wait_for("Hello there\n> ")
    for command in ("/help", "/clear", "/exit"):
        terminal.type(f"{command} extra\n")
        terminal.wait_for(f"{command} takes no value.\n> ")
    terminal.type("/clear\n")
    terminal.wait_for("The conversation is empty.\n> ")
    terminal.type("/set temperature 0.5\n")
    terminal.wait_for("temperature=0.5\n> ")
    terminal.type("/set temprature 1\n")
    terminal.wait_for("temprature: unknown sampling parameter; did you mean temperature?\n> ")
    terminal.type("/sett x\n")
    terminal.wait_for("/sett: unknown command; did you mean /set?\n> ")
    terminal.type("/system Be brief.\n")
    terminal.wait_for("The conversation is empty.\n> ")
    terminal.type("//three\n")
    terminal.wait_for("Hello there\n> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(WAIT) == 0
    assert messages(grpc_fake, 1) == ["one", "Hello there", "two"]
    assert messages(grpc_fake, 2) == ["Be brief.", "/three"]
    assert json.loads(grpc_fake.seen.requests[2]["sampling_parameters"])["temperature"] == 0.5


def test_ctrl_c_stops_a_reply_and_input_during_it_is_not_shown(chat, grpc_fake):
    terminal = chat("-p", SAY, "-p", "hold=true")
    terminal.type("one\n")
    terminal.wait_for("Hello there")
    terminal.type("typed too early")
    terminal.type("\x03")
    shown = terminal.wait_for("> ")
    assert "typed" not in shown
    assert grpc_fake.seen.left.wait(WAIT)
    grpc_fake.seen.left.clear()
    terminal.type("two\n")
    assert re.fullmatch(r"two\n", terminal.wait_for("Hello there"))
    assert messages(grpc_fake, 1) == ["one", "Hello there", "two"]
    terminal.type("\x03")
    terminal.wait_for("> ")
    terminal.interrupt_prompt()  # the second in a row
    assert terminal.process.wait(WAIT) == 0


def test_ctrl_c_twice_at_the_prompt_exits(chat):
    terminal = chat()
    terminal.interrupt_prompt()
    terminal.wait_for("Press Ctrl-C again or Ctrl-D to exit.\n> ")
    terminal.interrupt_prompt()
    assert terminal.process.wait(WAIT) == 0


def test_ctrl_c_that_discards_text_does_not_exit(chat, grpc_fake):
    terminal = chat("-p", SAY, "-p", "hold=true")
    terminal.type("one\n")
    terminal.wait_for("Hello there")
    terminal.type("\x03")
    terminal.wait_for("> ")
    for _ in range(2):
        terminal.type("never sent")
        terminal.wait_for("never sent")
        terminal.interrupt_prompt()
        terminal.wait_for("Press Ctrl-C again or Ctrl-D to exit.\n> ")
    terminal.interrupt_prompt()
    assert terminal.process.wait(WAIT) == 0
    assert len(grpc_fake.seen.requests) == 1


def test_values_are_checked_when_they_are_set(chat):
    terminal = chat("-p", SAY)
    for text, shown in [
        ("max_tokens five", 'max_tokens="five": must be a whole number 1..2147483647'),
        ("temperature -1", "temperature=-1: must be at least 0 and at most 100"),
        ("ignore_eos 3", "ignore_eos=3: must be true or false"),
    ]:
        terminal.type(f"/set {text}\n")
        terminal.wait_for(f"{shown}\n> ")
    terminal.type('/set stop ["a"]\n')
    assert "five" not in terminal.wait_for("stop=['a']\n> ")


def test_history_is_kept(chat, tmp_path):
    terminal = chat("-p", SAY)
    terminal.type("remember me\n")
    terminal.wait_for("Hello there\n> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(WAIT) == 0
    assert (tmp_path / "chat_history").read_text().splitlines()[-2:] == ["remember me", "/exit"]
    terminal = chat("-p", SAY)
    terminal.type("\x1b[A\x1b[A")  # two lines up
    terminal.wait_for("remember me")
