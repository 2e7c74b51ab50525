"""The tokenizer: panics."""

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paged_backend.api.errors import RequestError
from paged_backend.text.tokenizing import PromptTokenizer


def test_a_tokenizer_panic_fails_the_request():
    """Its regex engine panics after too many attempts; `except Exception` does not catch a panic."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, "x"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizing = PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    with pytest.raises(RequestError, match="INVALID_ARGUMENT: text_input: the tokenizer fails on it: Panic"):
        tokenizing.encode("text_input", "x" * 100)
