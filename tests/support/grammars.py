"""Compile grammars in tests and check which texts they allow."""

from queue import SimpleQueue

import numpy as np

from paged_backend.api.structures import read_structure
from paged_backend.guided.compiler import GrammarCompiler
from tests.support.in_process import WAIT, byte_tokenizer

SLOW = {"type": "integer", "multipleOf": 999_983}  # compiles for a minute
# Overflows the stack of the sandbox process.
DEEP = "start: r0\n" + "\n".join(f"r{index}: r{index + 1}" for index in range(4000)) + '\nr4000: "a"'
VOCAB, END = 320, 256


def create_compiler(**options):
    return GrammarCompiler(byte_tokenizer(), VOCAB, frozenset([2, END]), **{"seconds": WAIT} | options)


def compile_guides(grammars, name, value, count=1):
    """Return the guides of a structure, or the error."""
    answers = SimpleQueue()
    grammars.compile(read_structure(name, value), count, answers.put)
    return answers.get(timeout=WAIT)


def allowed_tokens(guide):
    words = np.zeros(guide.num_words, dtype=np.int32)
    guide.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))


def accepts(guides, text):
    """Return whether the guide accepts an output that consists of exactly this text."""
    (guide,) = guides
    for token_id in byte_tokenizer().encode(text):
        if token_id not in allowed_tokens(guide):
            return False
        guide.advance([token_id])
    return END in allowed_tokens(guide)


def record_compilations(monkeypatch, grammars):
    """Return a list that receives the (kind, text, tenant) of each compilation."""
    keys, compile = [], grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda key: keys.append(key) or compile(key))
    return keys


def token(char):
    (found,) = byte_tokenizer().encode(char)
    return found
