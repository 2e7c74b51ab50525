"""The process that tries grammars for `trial`. Its stack and its memory are smaller than the server's, so that
what passes here passes there. It imports little, to start quickly.
"""

from __future__ import annotations

import json
import resource
import threading
from multiprocessing.connection import Connection

import llguidance

from paged_backend.guided.grammar import grammar_of, matcher

STACK_BYTES = 1 << 20  # threads of the server have 8 MiB
MEMORY_BYTES = 1 << 30


def main(descriptor: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one that crashes is no news
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(Connection(descriptor),))
    thread.start()
    thread.join()


def _serve(channel: Connection) -> None:
    tokenizer = llguidance.LLTokenizer("byte")
    channel.send_bytes(b"ready")
    while True:
        try:
            kind, text = json.loads(channel.recv_bytes())
        except (EOFError, OSError):  # the server is gone
            return
        try:
            grammar = grammar_of(kind, text)
            matcher(tokenizer, grammar).deep_copy()
            answer = {"grammar": grammar}
        except Exception as error:  # what the library's parts raise has many names
            answer = {"error": str(error) or type(error).__name__}
        channel.send_bytes(json.dumps(answer).encode())
