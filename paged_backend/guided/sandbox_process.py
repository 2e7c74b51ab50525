"""The process that tries grammars for `trial`. Its stack and its memory are smaller than the server's, so that
what passes here passes there. It imports little, to start quickly.
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

from paged_backend.guided.grammar import GrammarSettings, build_grammar, matcher

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
    setup = GrammarSettings(*json.loads(channel.recv_bytes()))
    tokenizer_for = _tokenizers(setup)
    channel.send_bytes(b"ready")
    while True:
        try:
            kind, text = json.loads(channel.recv_bytes())
        except (EOFError, OSError):  # the server is gone
            return
        try:
            grammar = build_grammar(kind, text, any_whitespace=setup.any_whitespace)
            matcher(tokenizer_for(kind), grammar).deep_copy()
            answer = {"grammar": grammar}
        except Exception as error:  # what the library's parts raise has many names
            answer = {"error": str(error) or type(error).__name__}
        channel.send_bytes(json.dumps(answer).encode())


def _tokenizers(setup: GrammarSettings) -> Callable[[str], Any]:
    """By the kind of structure: of single bytes, and, for grammars alone, which may name tokens, as many as the model
    has with the special ones among them. That one takes its time with a large vocabulary."""
    plain = llguidance.LLTokenizer("byte")
    full = functools.cache(lambda: llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(setup))))
    return lambda kind: full() if kind == "grammar" else plain


class _Tokens:
    """As the library wants a tokenizer: single bytes, one that ends the output, special ones, and some of no text."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, setup: GrammarSettings):
        tokens = [*(bytes([byte]) for byte in range(256)), b"", *(one.encode() for one in setup.special_tokens)]
        self.special_token_ids = range(self.eos_token_id + 1, len(tokens))
        self.tokens = tokens + [b""] * (setup.vocab_size - len(tokens))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
