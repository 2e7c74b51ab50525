"""Tokenizers for tests."""

import threading
from queue import SimpleQueue

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.support.in_process import WAIT

# A chat template that does not terminate, up to one closing tag.
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"


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


def with_template(template):
    """Return a tokenizer with this chat template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    tokenizer.chat_template = template
    return tokenizer
