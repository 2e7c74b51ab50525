"""`paged chat` on a terminal: a conversation with commands, history and line editing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from paged_backend.api.errors import closest_match, hint
from paged_backend.utils.machine import user_cache_directory
from paged_client.commands.arguments import json_or_text
from paged_client.sampling_values import NAMES, problem_of
from paged_client.session import TerminalSession
from paged_client.wire import Message

HISTORY_LINES = 1000
HELP = """\
/help              show this list
/clear             forget the conversation
/system TEXT       start again with this system message
/set NAME VALUE    set a sampling parameter; /set NAME removes it, /set lists all
/exit              end; Ctrl-D does the same
//TEXT             send a text that begins with a slash
Ctrl-C stops a reply, and pressed twice it ends the conversation."""
_NO_VALUE = {"/help", "/clear", "/exit"}


class Chat:
    """A conversation on the terminal.

    Args:
        session: sends the requests and prints their output.
        history: messages that the conversation begins with.
        server: what the banner says about the server.
    """

    def __init__(self, session: TerminalSession, history: Sequence[Message], server: str) -> None:
        self._session = session
        self._beginning = list(history)
        self._messages = list(history)
        self._server = server
        self._was_interrupted = False  # whether Ctrl-C was the last key
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/clear": self._clear,
            "/system": self._set_system,
            "/set": self._set,
            "/exit": lambda _: None,
        }

    def run(self) -> None:
        """Read lines and print replies until Ctrl-D, /exit, or Ctrl-C pressed twice."""
        print(f"{self._server}. /help lists the commands, Ctrl-C stops a reply, Ctrl-D exits.", flush=True)
        with _line_history():
            while (line := self._read_line()) is not None:
                text = line.strip()
                if text == "/exit":
                    return
                if text.startswith("/") and not text.startswith("//"):
                    self._run_command(text)
                elif text and not self._reply(line.replace("//", "/", 1) if text.startswith("//") else line):
                    return

    def _read_line(self) -> str | None:
        """Read a line: empty after a first Ctrl-C, None after Ctrl-D or a second Ctrl-C.

        A Ctrl-C that discards typed text is a first one.
        """
        try:
            line = input("> ")
        except KeyboardInterrupt:
            print()
            if self._was_interrupted and not _typed_text():
                return None
            print("Press Ctrl-C again or Ctrl-D to exit.")
            self._was_interrupted = True
            return ""
        except EOFError:
            print()
            return None
        self._was_interrupted = False
        return line

    def _reply(self, text: str) -> bool:
        """Send a message and print the reply. Return False if Ctrl-C was pressed twice."""
        try:
            with _input_hidden():
                turn = self._session.turn(self._messages, text)
        except KeyboardInterrupt:
            print()
            return False
        self._was_interrupted = turn.interrupted
        self._messages += turn.messages
        return True

    def _run_command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        command = self._commands.get(name)
        if command and rest.strip() and name in _NO_VALUE:
            print(f"{name} takes no value.")
            return
        if command:
            command(rest.strip())
            return
        near = closest_match(name, self._commands)
        print(f"{name}: unknown command; {f'did you mean {near}?' if near else '/help lists the commands'}")

    def _clear(self, _: str) -> None:
        self._messages = list(self._beginning)
        print("The conversation is empty.")

    def _set_system(self, text: str) -> None:
        self._beginning = [{"role": "system", "content": text}] if text else []
        self._clear("")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        sampling = self._session.sampling
        if name and name not in NAMES:
            print(f"{name}: unknown sampling parameter; {hint(name, NAMES)}")
            return
        if name and value.strip():
            parsed = json_or_text(value.strip())
            if problem := problem_of(name, parsed):
                print(problem)
                return
            sampling[name] = parsed
        elif name:
            sampling.pop(name, None)
        print(", ".join(f"{key}={value!r}" for key, value in sampling.items()) or "No sampling parameter is set.")


def _typed_text() -> str:
    """Return what was typed at the prompt when Ctrl-C was pressed; empty where Python has no readline."""
    try:
        import readline
    except ImportError:
        return ""
    return readline.get_line_buffer()


@contextmanager
def _input_hidden() -> Iterator[None]:
    """Hide what is typed, to keep it out of the output, and discard it at the end."""
    try:
        import termios

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError):  # no terminal
        yield
        return
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcflush(descriptor, termios.TCIFLUSH)
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


@contextmanager
def _line_history() -> Iterator[None]:
    """Give input() editing, and a history that is kept in a file, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = user_cache_directory() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
