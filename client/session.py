"""Questions to a running server and answers on the terminal: what `paged generate` and `paged chat` do."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client.sync_client import Client, Stream
from client.types import Completion, PagedError
from client.wire import Message


class UsageError(Exception):
    """The command line, or what it was given to send, is wrong; the message says where."""


@dataclass
class Timing:
    """When a request was sent and its first piece came, in seconds of perf_counter."""

    started: float
    first: float | None = None

    def report(self, answer: Completion) -> str:
        now = time.perf_counter()
        seconds = now - self.started
        first = "no text" if self.first is None else f"first text after {self.first - self.started:.3f} s"
        samples = (answer, *answer.others)
        num_output_tokens = sum(sample.num_output_tokens for sample in samples)
        reasons = ", ".join(dict.fromkeys(sample.finish_reason for sample in samples))
        cached = f" ({answer.receipt['cached_tokens']} cached)" if answer.receipt else ""
        return (
            f"{answer.num_input_tokens} prompt tokens{cached}, {num_output_tokens} output tokens"
            f" ({reasons}); {first},"
            f" {num_output_tokens / seconds:.1f} tokens/s over {seconds:.3f} s"
        )


class TerminalSession:
    """A server, and what every request of one command line has in common.

    Args:
        client: where the requests go.
        sampling: the sampling parameters of each.
        timeout: seconds for each answer; None: no limit.
        stats: report counts and speed on standard error.
    """

    def __init__(
        self,
        client: Client,
        sampling: Mapping[str, Any],
        *,
        timeout: float | None = None,
        stats: bool = False,
    ) -> None:
        self._client = client
        self._sampling = sampling
        self._timeout = timeout
        self._stats = stats
        self._timing = Timing(time.perf_counter())  # of the request that is running

    def generate(self, prompt: str, *, whole: bool = False) -> None:
        """Print what continues `prompt`: as it comes, or in one piece where `whole`."""
        with self._ask(prompt=prompt) as stream:
            self._print(stream, whole=whole)

    def chat_once(self, history: Sequence[Message], text: str) -> None:
        with self._ask(messages=[*history, _message("user", text)]) as stream:
            self._print(stream)

    def chat(self, history: Sequence[Message]) -> None:
        """A conversation on the terminal. Ctrl-C ends the answer that is running, Ctrl-D the conversation."""
        conversation = list(history)
        while (text := _read_line()) is not None:
            if text.strip():
                conversation += self._turn(conversation, text)

    def _turn(self, conversation: Sequence[Message], text: str) -> list[Message]:
        """One question: it and its answer, or nothing where there was no answer to go on from."""
        question = _message("user", text)
        try:
            with self._ask(messages=[*conversation, question]) as stream:
                answer = self._print_until_interrupted(stream)
        except PagedError as error:
            print(f"paged: {error}", file=sys.stderr)
            return []
        return [question, _message("assistant", answer)] if answer else []

    def _ask(self, *, prompt: str | None = None, messages: Sequence[Message] | None = None) -> Stream:
        self._timing = Timing(time.perf_counter())
        try:
            return self._client.stream(prompt, messages=messages, timeout=self._timeout, **self._sampling)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _print_until_interrupted(self, stream: Stream) -> str:
        try:
            return self._print(stream)
        except KeyboardInterrupt:
            stream.cancel()
            print()
            return self._finish(stream)

    def _print(self, stream: Stream, *, whole: bool = False) -> str:
        try:
            self._print_deltas(stream, whole)
        except PagedError:
            if self._timing.first and not whole:
                print(flush=True)  # the error starts a line of its own
            raise
        answer = stream.completion
        print(answer.text if whole and answer else "", flush=True)
        for number, other in enumerate(answer.others if answer else (), 2):
            print(f"--- sample {number} ---\n{other.text}", flush=True)
        return self._finish(stream)

    def _print_deltas(self, stream: Stream, whole: bool) -> None:
        for delta in stream:
            self._timing.first = self._timing.first or time.perf_counter()
            if not whole and delta.index == 0:  # the other samples follow when all is there
                print(delta.text, end="", flush=True)

    def _finish(self, stream: Stream) -> str:
        answer = stream.completion
        assert answer is not None  # a stream that failed has raised
        if self._stats:
            print(self._timing.report(answer), file=sys.stderr)
        return answer.text


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _read_line() -> str | None:
    """A line from the terminal; empty after Ctrl-C, None after Ctrl-D."""
    try:
        return input("> ")
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def read_stdin() -> str:
    """All of standard input but the line end that closes it, which `echo` adds unasked."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input: not UTF-8: {error.reason} at byte {error.start}") from None
