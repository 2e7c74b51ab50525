"""Tokenizers for tests."""

import threading
from queue import SimpleQueue

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.support.in_process import WAIT

# A chat template that does not terminate, up to one closing tag.
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"

TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<assistant>"


def write_tokenizer(directory, template=TEMPLATE):
    """Save a tokenizer of words, with a chat template, as a Hugging Face directory."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2, "<user>": 3, "<assistant>": 4}, "<unk>"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")
    made.chat_template = template
    made.save_pretrained(directory)
    return directory


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
