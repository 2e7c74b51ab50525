"""A process that encodes long prompts.

Parsing, checking and rendering megabytes hold Python's lock. In the engine's process they would delay steps and other
requests; and a tokenizer that does not come to an end could not be stopped.

The process reads pickles from its standard input, which only its parent can write to, and writes pickles to its
standard output: first it reads a `PromptEncoder` and its time limit, then it answers each `Prompt` with an
`EncodedPrompt` or a `RequestError`. It ends when its standard input is closed, and at the time limit.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from contextlib import suppress

from paged_backend.api.errors import ErrorCode, RequestError, internal_error
from paged_backend.server.prompts.encoder import EncodedPrompt, Prompt, PromptEncoder
from paged_backend.utils.child_process import end_process, start_module


class PromptProcess:
    """Encodes prompts in another process, one at a time. The process starts with the first prompt or with `start`,
    which takes about 2 seconds, and starts again if it has ended."""

    def __init__(self, encoder: PromptEncoder, seconds: float):
        """seconds: the time limit for a prompt (`tokenize_timeout`)."""
        self._encoder = encoder
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Return the process, which starts if it is not running. For the thread that encodes."""
        if self._process and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            first = pickle.dumps((self._encoder, self._seconds), pickle.HIGHEST_PROTOCOL)
            self._process = start_module(__name__, first=first, environment={}, stdout=subprocess.PIPE)
        return self._process

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Like `PromptEncoder.encode`. Raises RequestError as well if it takes too long, or if the process is killed,
        for example because memory is used up. For one thread at a time."""
        process = self.start()
        assert process.stdin and process.stdout
        try:
            pickle.dump(prompt, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            self.stop()
            raise self._failure(prompt, process.returncode) from None
        except BaseException:
            self.stop()  # the pipes may hold the rest of a message
            raise
        if isinstance(answer, RequestError):
            raise answer
        assert isinstance(answer, EncodedPrompt)
        return answer

    def stop(self) -> None:
        """End the process, also while it encodes a prompt. May be called from any thread."""
        process, self._process = self._process, None
        if process:
            process.kill()
            end_process(process, 0)

    def _failure(self, prompt: Prompt, status: int) -> RequestError:
        if status == -signal.SIGALRM:
            reason = f"tokenizing it takes more than {self._seconds:g} s (tokenize_timeout)"
            return RequestError(ErrorCode.INVALID_ARGUMENT, f"{prompt.call.prompt_field}: {reason}")
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return RequestError(ErrorCode.INTERNAL, f"the process that encodes long prompts has ended ({how}); retry")


def main() -> None:
    """Encode prompts until the standard input is closed."""
    requests, answers, sys.stdout = sys.stdin.buffer, sys.stdout.buffer, sys.stderr  # libraries may print
    with suppress(EOFError):
        encoder, seconds = pickle.load(requests)
        while True:
            prompt = pickle.load(requests)
            signal.setitimer(signal.ITIMER_REAL, seconds)  # ends the process, whatever code it is in
            try:
                answer: EncodedPrompt | RequestError = encoder.encode(prompt)
            except RequestError as error:
                answer = error
            except Exception as error:
                answer = internal_error(error)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
            del prompt, answer  # the next prompt may come much later


if __name__ == "__main__":
    main()
