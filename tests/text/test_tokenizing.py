"""The tokenizer: panics and time limits."""

import threading

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.text.tokenizing import PromptTokenizer
from tests.support.in_process import WAIT
from tests.support.tokenizers import SlowTokenizer

LONG = "a" * 300


@pytest.fixture
def slow():
    made = SlowTokenizer(LONG)
    yield made
    made.go_on.set()


def test_a_tokenizer_panic_fails_the_request():
    """Its regex engine panics after too many attempts; `except Exception` does not catch a panic."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, "x"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizing = PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), WAIT)
    for encode in (tokenizing.encode, tokenizing.encode_long):
        with pytest.raises(RequestError, match="INVALID_ARGUMENT: text_input: the tokenizer fails on it: Panic"):
            encode("text_input", "x" * 100)


def test_slow_tokenization_times_out_and_never_runs_twice(slow):
    tokenizing = PromptTokenizer(slow, 0.05)
    with pytest.raises(RequestError) as caught:
        tokenizing.encode_long("messages", LONG)
    assert str(caught.value) == (
        "INVALID_ARGUMENT: messages: tokenizing its 300 characters takes more than 0.05 s (tokenize_timeout)"
    )
    for _ in range(3):
        with pytest.raises(
            RequestError, match=r"another prompt is still being tokenized after tokenize_timeout=0.05"
        ) as caught:
            tokenizing.encode_long("text_input", LONG)
        assert caught.value.code is ErrorCode.UNAVAILABLE
    assert slow.began.qsize() == 1
    assert tokenizing.encode("text_input", "short") == [1]
    slow.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "tokenizer":
            thread.join(WAIT)
    assert (
        PromptTokenizer(slow, WAIT).encode_long("text_input", LONG) == tokenizing.encode_long("text_input", LONG) == [1]
    )
