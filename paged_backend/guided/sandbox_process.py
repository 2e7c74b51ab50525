"""The sandbox process of `sandbox.py`.

Its stack and memory limits are below the server's, so a grammar that compiles here compiles there as well. It imports
few modules to start quickly.
"""

from __future__ import annotations

import functools
import json
import resource
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import llguidance

from paged_backend.guided.grammar import GrammarSettings, build_grammar, create_matcher

STACK_BYTES = 1 << 20  # stack of the sandbox; the server's threads have 8 MiB
MEMORY_BYTES = 1 << 30


def main(descriptor: int) -> None:
    """Serve compile requests on an inherited socket until it is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps, since stack overflows are expected
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(Connection(descriptor),))
    thread.start()
    thread.join()


def _serve(channel: Connection) -> None:
    settings = GrammarSettings(*json.loads(channel.recv_bytes()))
    tokenizer_for = _tokenizers(settings)
    channel.send_bytes(b"ready")
    while True:
        try:
            kind, text = json.loads(channel.recv_bytes())
        except (EOFError, OSError):  # raised when the server has closed the socket
            return
        try:
            grammar = build_grammar(kind, text, any_whitespace=settings.any_whitespace)
            create_matcher(tokenizer_for(kind), grammar).deep_copy()
            answer = {"grammar": grammar}
        except Exception as error:  # any exception, as llguidance raises many types
            answer = {"error": str(error) or type(error).__name__}
        channel.send_bytes(json.dumps(answer).encode())


def _tokenizers(settings: GrammarSettings) -> Callable[[str], Any]:
    """Return a function from the kind of a structure to the tokenizer to compile it with.

    Only grammars can name tokens. They get a tokenizer with the model's vocabulary size and special tokens, which is
    slow to create for a large vocabulary; all other kinds get a tokenizer of single bytes.
    """
    plain = llguidance.LLTokenizer("byte")
    full = functools.cache(lambda: llguidance.LLTokenizer(llguidance.TokenizerWrapper(_SandboxTokenizer(settings))))
    return lambda kind: full() if kind == "grammar" else plain


class _SandboxTokenizer:
    """Implements llguidance's tokenizer protocol: 256 bytes, end of sequence, special tokens, then empty tokens."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, settings: GrammarSettings) -> None:
        tokens = [*(bytes([byte]) for byte in range(256)), b"", *(text.encode() for text in settings.special_tokens)]
        self.special_token_ids = range(self.eos_token_id + 1, len(tokens))
        self.tokens = tokens + [b""] * (settings.vocab_size - len(tokens))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
