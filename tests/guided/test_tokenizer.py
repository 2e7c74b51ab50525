"""Tokenizers for llguidance: literal text, added tokens, byte fallback, and unsupported tokenizers."""

import pytest
from tokenizers import AddedToken, normalizers

from paged_backend.guided.compiler import GrammarCompiler
from tests.support.grammars import END, VOCAB, allowed_tokens, compile_guides
from tests.support.in_process import WAIT, byte_tokenizer

NAMED = {
    "type": "object",
    "properties": {"<|end|>": {"enum": ["[PAD]<s>"]}},
    "required": ["<|end|>"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def added():
    """A tokenizer with special and added tokens and a normalizer, and a compiler for it."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    special = [AddedToken(text, special=True, normalized=False) for text in ("[PAD]", "<s>")]
    plain = [AddedToken(text, special=False) for text in ("<think>", "wörd", "  ")]
    tokenizer.add_tokens([*special, *plain, AddedToken("<mask>", special=True, lstrip=True, normalized=False)])
    grammars = GrammarCompiler(tokenizer, VOCAB, frozenset([END]), seconds=WAIT)
    yield tokenizer, grammars
    grammars.stop()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("choice", ["<|end|>x"], "<|end|>x"),
        ("choice", ["[PAD]<s> <think>a <mask>"], "[PAD]<s> <think>a <mask>"),
        ("choice", ["a wörd  of e\u0301"], "a wörd  of e\u0301"),
        ("regex", r"a<\|end\|>b<s>", "a<|end|>b<s>"),
        ("json_schema", {"const": "<s>"}, '"<s>"'),
        ("structured_outputs", {"json": NAMED, "disable_any_whitespace": True}, '{"<|end|>":"[PAD]<s>"}'),
        ("grammar", 'root ::= "<|end|>" "<s>"', "<|end|><s>"),
        ("grammar", 'start: "<|end|>" <s> "<s>" <think> "<think>"', "<|end|><s><s><think><think>"),
    ],
)
def test_text_that_looks_like_special_tokens_is_encoded_literally(added, name, value, text):
    """A grammar can name special tokens only outside of quotation marks."""
    tokenizer, grammars = added
    (guide,) = compile_guides(grammars, name, value)
    ids = []
    while END not in (candidates := allowed_tokens(guide)) and len(ids) < 99:
        ids.append(min(candidates))
        guide.advance(ids[-1:])
    assert tokenizer.decode(ids) == text
    named = {"<s>", "<think>"} if '<think> "' in str(value) else set()
    assert {token for token in tokenizer.convert_ids_to_tokens(ids) if len(token) > 1} - {"wörd", "  "} == named


def sentencepiece_tokenizer():
    """Words with a marker for the preceding space, and bytes for all other text."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcde", "▁a", "▁ab", "cd"]
    merges = [("▁", "a"), ("▁a", "b"), ("c", "d")]
    model = models.BPE({word: index for index, word in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def test_sentencepiece_tokenizer_with_byte_fallback():
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.get_vocab()
    grammars = GrammarCompiler(tokenizer, 288, frozenset([ids["</s>"]]), seconds=WAIT)
    (guide,) = compile_guides(grammars, "regex", " [ab]+é")
    tokens = {tokenizer.convert_ids_to_tokens([int(index)])[0] for index in allowed_tokens(guide)}
    assert tokens == {"▁", "▁a", "▁ab", "<0x20>"}
    guide.advance([ids["▁ab"]])
    assert allowed_tokens(guide) == {ids[word] for word in ("a", "b", "<0x61>", "<0x62>", "<0xC3>")}
    guide.advance([ids["<0xC3>"], ids["<0xA9>"]])
    assert allowed_tokens(guide) == {ids["</s>"]}
    grammars.stop()


@pytest.mark.parametrize(
    ("tokenizer", "eos", "message"),
    [
        (object(), {1}, "tokenizer, object, has no tokenizer.json"),
        (byte_tokenizer(), set(), "this model has no end-of-sequence token"),
    ],
)
def test_unsupported_tokenizer_is_named(tokenizer, eos, message):
    grammars = GrammarCompiler(tokenizer, VOCAB, frozenset(eos), seconds=WAIT)
    error = compile_guides(grammars, "regex", "a")
    assert str(error).startswith("INVALID_ARGUMENT: regex: not available")
    assert message in str(error)
    grammars.stop()
