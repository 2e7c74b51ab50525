"""Terminal sessions: `paged generate` and `paged chat` send requests to a server and print its output."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any

from paged_client.sync_client import Client
from paged_client.sync_stream import Stream
from paged_client.types import Completion, PagedError
from paged_client.wire import Message

# As many tokens as fit the context, or the model's `max_new_tokens`. vLLM's default, 16, is too short to read, and a
# model with a short context rejects a higher number.
AS_MANY_AS_FIT = None  # `max_tokens` of a request that sets no limit
ANSWER_TOKENS = 512  # limit of an answer in a chat; a small model may otherwise repeat itself until the context is full


class UsageError(Exception):
    """Invalid command-line arguments or input. The message names the argument."""


@dataclass
class Timing:
    """Times of one request, in seconds of time.perf_counter()."""

    started: float
    first: float | None = None  # time of the first text

    def report(self, completion: Completion) -> str:
        """Return token counts, time to first text and throughput, and the digests of the logits if requested."""
        now = time.perf_counter()
        seconds = now - self.started
        first = "no text" if self.first is None else f"first text after {self.first - self.started:.3f} s"
        samples = (completion, *completion.others)
        num_output_tokens = sum(sample.num_output_tokens for sample in samples)
        reasons = ", ".join(dict.fromkeys(sample.finish_reason for sample in samples))
        cached = f" ({completion.receipt['cached_tokens']} cached)" if completion.receipt else ""
        digests = (completion.receipt or {}).get("logits_digests", ())
        return (
            f"{completion.num_input_tokens} prompt tokens{cached}, {num_output_tokens} output tokens"
            f" ({reasons}); {first},"
            f" {num_output_tokens / seconds:.1f} tokens/s over {seconds:.3f} s"
        ) + "".join(f"\ndigest of the logits: {digest}" for digest in digests)


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation: its two messages, or no messages if there is no reply to continue from."""

    messages: tuple[Message, ...] = ()
    interrupted: bool = False  # whether Ctrl-C has ended the reply


class CtrlC:
    """A context in which a first Ctrl-C cancels the request, and a second one raises KeyboardInterrupt.

    Another thread cancels the request: a KeyboardInterrupt that is raised inside gRPC can leave a lock of the channel
    held, and then the next request never starts.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._request: Stream | None = None
        self._presses: SimpleQueue[bool] = SimpleQueue()  # put() may interrupt itself in a signal handler
        self._thread = threading.Thread(target=self._cancel, daemon=True)

    def cancels(self, request: Stream) -> None:
        """Cancel this request when Ctrl-C is pressed, or now if it was."""
        self._request = request
        if self.pressed:
            request.cancel()

    def __enter__(self) -> CtrlC:
        self._thread.start()
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        self._presses.put(False)
        self._thread.join()

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        self._presses.put(True)

    def _cancel(self) -> None:
        if self._presses.get() and self._request:
            self._request.cancel()


class TerminalSession:
    """Sends the requests of one command and prints their output.

    Args:
        client: client of the server.
        sampling: sampling parameters of every request; the attribute `sampling` may be changed. `max_tokens` has a
            default: AS_MANY_AS_FIT, and in a chat ANSWER_TOKENS.
        timeout: time limit of each request in seconds; None is no limit.
        stats: print token counts and throughput to standard error.
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
        self.sampling = dict(sampling)
        self._timeout = timeout
        self._stats = stats
        self._timing = Timing(time.perf_counter())  # times of the current request

    def generate(self, prompt: str, *, stream: bool = True) -> None:
        """Print the completion of `prompt`, as it arrives or, without `stream`, once it is complete."""
        with self._send(prompt=prompt) as responses:
            self._print(responses, stream=stream)

    def chat_once(self, history: Sequence[Message], text: str) -> None:
        """Print the reply to one user message."""
        self._answer([*history, _message("user", text)], self._print, "--max-tokens N allows more")

    def turn(self, conversation: Sequence[Message], text: str) -> Turn:
        """Send a message and print the reply; an error is printed as well. Ctrl-C stops the reply."""
        question = _message("user", text)
        with CtrlC() as ctrl_c:

            def show(responses: Stream) -> str:
                ctrl_c.cancels(responses)
                return self._print(responses)

            try:
                reply = self._answer([*conversation, question], show, "/set max_tokens N allows more")
            except (PagedError, UsageError) as error:
                print(f"paged: {error}", file=sys.stderr)
                return Turn()
        messages = (question, _message("assistant", reply)) if reply else ()
        return Turn(messages, ctrl_c.pressed)

    def _answer(self, messages: Sequence[Message], show: Callable[[Stream], str], remedy: str) -> str:
        """Send a conversation and return what `show` returns for the responses. Say so if the answer was cut.

        It is cut after ANSWER_TOKENS unless `sampling` has another limit, or sooner where the context or the KV cache
        is full. remedy: how to allow more tokens.
        """
        if "max_tokens" not in self.sampling:
            try:
                return self._show_answer(messages, ANSWER_TOKENS, show, remedy)
            except PagedError as error:
                if error.code != "INVALID_ARGUMENT" or not error.message.startswith("max_tokens="):
                    raise
            # There is room for fewer tokens: ask for as many as fit.
        if self.sampling.get("max_tokens") is AS_MANY_AS_FIT:
            remedy = "the model's max_new_tokens, context or KV cache allows no more"
        return self._show_answer(messages, AS_MANY_AS_FIT, show, remedy)

    def _show_answer(
        self, messages: Sequence[Message], max_tokens: int | None, show: Callable[[Stream], str], remedy: str
    ) -> str:
        with self._send(messages=messages, max_tokens=max_tokens) as responses:
            shown = show(responses)
        completion = responses.completion
        samples = (completion, *completion.others) if completion else ()
        if cut := [sample.num_output_tokens for sample in samples if sample.finish_reason == "length"]:
            print(f"note: the answer was cut after {cut[0]} tokens; {remedy}", file=sys.stderr)
        return shown

    def _send(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        max_tokens: int | None = AS_MANY_AS_FIT,
    ) -> Stream:
        self._timing = Timing(time.perf_counter())
        sampling = {"max_tokens": max_tokens, **self.sampling}
        try:
            return self._client.stream(prompt, messages=messages, timeout=self._timeout, **sampling)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _print(self, responses: Stream, *, stream: bool = True) -> str:
        try:
            self._print_deltas(responses, stream)
        except PagedError:
            if self._timing.first and stream:
                print(flush=True)  # the error message starts on a new line
            raise
        completion = responses.completion
        print(completion.text if completion and not stream else "", flush=True)
        for number, other in enumerate(completion.others if completion else (), 2):
            print(f"--- sample {number} ---\n{other.text}", flush=True)
        return self._finish(responses)

    def _print_deltas(self, responses: Stream, stream: bool) -> None:
        for delta in responses:
            self._timing.first = self._timing.first or time.perf_counter()
            if stream and delta.index == 0:  # the other samples are printed at the end
                print(delta.text, end="", flush=True)

    def _finish(self, responses: Stream) -> str:
        completion = responses.completion
        assert completion is not None  # a stream that failed has raised
        if self._stats:
            print(self._timing.report(completion), file=sys.stderr)
        return completion.text


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def read_stdin() -> str:
    """Read standard input without its last newline, which `echo` adds. Raises UsageError."""
    if sys.stdin is None:  # as with `<&-` in a shell
        raise UsageError("standard input is closed")
    if sys.stdin.isatty():
        print("Type a prompt and end it with Ctrl-D on a line of its own.", file=sys.stderr)
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input: not UTF-8: {error.reason} at byte {error.start}") from None
