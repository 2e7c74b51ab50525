"""A tokenizer for models with random weights, which needs no download: a token for each byte, then numbers."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paged_client.serving.server_files import cache_directory, create_atomically

END = "<|end|>"


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `vocab_size` tokens, at least 257: the bytes, the end of sequence, and numbers.

    A text becomes bytes only. The numbers give the other tokens of a model a text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    names = [*alphabet, END, *(f"{space}{index}" for index in range(len(alphabet) + 1, vocab_size))]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def byte_tokenizer_directory(vocab_size: int) -> Path:
    """Return a directory with the files of `byte_tokenizer`, which is created in the cache if it is missing."""
    directory = cache_directory() / "models" / f"byte-tokenizer-{vocab_size}"
    if not directory.is_dir():
        create_atomically(directory, byte_tokenizer(vocab_size).save_pretrained)
    return directory
