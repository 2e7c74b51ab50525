"""Tokenizers for tests."""

import threading
from queue import SimpleQueue

from tests.support.in_process import WAIT


class SlowTokenizer:
    """A tokenizer that waits at the text `long` until `go_on` is set."""

    def __init__(self, long: str):
        self.long = long
        self.began: SimpleQueue[int] = SimpleQueue()
        self.go_on = threading.Event()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if text == self.long:
            self.began.put(len(text))
            assert self.go_on.wait(WAIT)
        return [1]
