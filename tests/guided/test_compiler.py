"""Compiling grammars: which texts they allow, time limits, queueing, and the cache."""

import json
import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest
from tokenizers import AddedToken, normalizers
from transformers import AutoTokenizer

from client.serving.demo_model import default_directory
from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.guide import GuideError
from paged_backend.api.limits import InputLimits
from paged_backend.api.structures import read_structure
from paged_backend.guided import compiler
from paged_backend.guided.compiler import GrammarCompiler
from paged_backend.guided.sandbox import TIMEOUT_CACHE_SECONDS
from tests.support.grammars import SLOW
from tests.support.in_process import WAIT, byte_tokenizer

VOCAB, END = 320, 256
# Overflows the stack of the sandbox process.
DEEP = "start: r0\n" + "\n".join(f"r{index}: r{index + 1}" for index in range(4000)) + '\nr4000: "a"'
LETTERS = " | ".join(f'"{char}"' for char in "abcdefghijklmnopqrstuvwxyz")
AMBIGUOUS = "start: " + " | ".join(f"r{index}" for index in range(8)) + "\n"
AMBIGUOUS += "\n".join(f"r{index}: r{index} r{index} | {LETTERS}" for index in range(8))


def create_compiler(**options):
    return GrammarCompiler(byte_tokenizer(), VOCAB, frozenset([2, END]), **{"seconds": WAIT} | options)


@pytest.fixture(scope="module")
def grammars():
    grammars = create_compiler()
    yield grammars
    grammars.stop()


def compile_guides(grammars, name, value, count=1):
    """Return the guides of a structure, or the error."""
    answers = SimpleQueue()
    grammars.compile(read_structure(name, value), count, answers.put)
    return answers.get(timeout=WAIT)


def record_compilations(monkeypatch, grammars):
    """Return a list that receives the (kind, text, tenant) of each compilation."""
    keys, compile = [], grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda key: keys.append(key) or compile(key))
    return keys


def token(char):
    (found,) = byte_tokenizer().encode(char)
    return found


def allowed(guide):
    words = np.zeros(guide.num_words, dtype=np.int32)
    guide.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))


def accepts(guides, text):
    """Return whether the guide accepts an output that consists of exactly this text."""
    (guide,) = guides
    for token_id in byte_tokenizer().encode(text):
        if token_id not in allowed(guide):
            return False
        guide.advance([token_id])
    return END in allowed(guide)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("name", "value", "good", "bad"),
    [
        (
            "json_schema",
            SCHEMA,
            ['{"name": "Ada", "age": 36}', '{"name":"é","age":0}'],
            ['{"name": "Ada"}', "[]", "{}"],
        ),
        ("json_schema", json.dumps(SCHEMA), ['{"name": "Ada", "age": 36}'], ['{"name": "Adalbert", "age": 36}']),
        ("json_object", True, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a": }']),
        ("json_object", "true", ["{}"], ["[]"]),
        ("regex", r"[a-c]{2}|\d+", ["ab", "123"], ["abc", "a", ""]),
        ("choice", ["yes", "yes, but", 'n"o\\', "né\n"], ["yes", "yes, but", 'n"o\\', "né\n"], ["no", "yes,"]),
        ("grammar", 'root ::= num ("+" num)*\nnum ::= [0-9]+', ["1+22", "3"], ["1+", "+", "a"]),
        ("grammar", 'start: num ("+" num)*\nnum: /[0-9]+/', ["1+22", "3"], ["1+", "+"]),
        ("structured_outputs", {"regex": "a+", "json": None, "json_object": False, "choice": None}, ["aa"], ["b"]),
        ("structured_outputs", json.dumps({"json": SCHEMA}), ['{"name": "", "age": 1}'], ["{}"]),
        ("structured_outputs", {"choice": ["a", "b"]}, ["b"], ["c"]),
        ("structured_outputs", {"json_object": True}, ["{}"], ["1"]),
        ("guided_decoding", json.dumps({"regex": "a+", "backend": "outlines"}), ["aa"], ["b"]),
        ("regex", " ", [" "], ["", "a"]),
        ("choice", [" ", "\n"], [" ", "\n"], ["", "  "]),
        (
            "structured_outputs",
            {"json_object": True, "disable_any_whitespace": True},
            ['{"a":[1,{"b":2}]}'],
            ['{"a": 1}', '{ "a":1}'],
        ),
        (
            "structured_outputs",
            {"json": {"type": "array", "x-guidance": {"item_separator": ";"}}, "whitespace_pattern": " {1,2}"},
            ["[1;2]", "[1;  2]"],
            ["[1,2]", "[1;   2]", "[1;\n2]"],
        ),
        ("json_object", True, ['{"a":' + 40 * " " + "1" + 40 * "\n" + "}"], ['{"a":' + 41 * " " + "1}"]),
    ],
)
def test_exactly_the_structure_is_allowed(grammars, name, value, good, bad):
    for text in good:
        assert accepts(compile_guides(grammars, name, value), text), text
    for text in bad:
        assert not accepts(compile_guides(grammars, name, value), text), text


def test_disable_any_whitespace():
    grammars = create_compiler(any_whitespace=False)
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    assert accepts(compile_guides(grammars, "json_object", True), '{"a":1}')
    assert not accepts(compile_guides(grammars, "json_object", True), '{"a": 1}')
    assert accepts(compile_guides(grammars, "json_schema", schema), '{"a": 1}')
    grammars.stop()


def test_grammars_can_name_special_tokens_and_ids():
    """Uses a real tokenizer, whose first ids are special tokens."""
    directory = default_directory()
    if not directory.exists():
        pytest.skip("make demo-model has not been run")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    grammars = GrammarCompiler(tokenizer, 49_152, frozenset([2]), seconds=WAIT)
    (guide,) = compile_guides(grammars, "grammar", "start: <|im_start|> /[0-9]/ <[300-302]> <repo_name>")
    for expected, sampled in (({1}, 1), (set(tokenizer.convert_tokens_to_ids(list("0123456789"))), None)):
        assert allowed(guide) == expected
        guide.advance([sampled or min(expected)])
    assert allowed(guide) == {300, 301, 302}
    guide.advance([301])
    assert allowed(guide) == {3}
    assert 'unknown special token: "<|im_stop|>"' in str(compile_guides(grammars, "grammar", "start: <|im_stop|>"))
    assert "Token range end too large: 49152" in str(compile_guides(grammars, "grammar", "start: <[49152]>"))
    grammars.stop()


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
    """Except if a grammar names the tokens outside of quotation marks."""
    tokenizer, grammars = added
    (guide,) = compile_guides(grammars, name, value)
    ids = []
    while END not in (candidates := allowed(guide)) and len(ids) < 99:
        ids.append(min(candidates))
        guide.advance(ids[-1:])
    assert tokenizer.decode(ids) == text
    named = {"<s>", "<think>"} if '<think> "' in str(value) else set()
    assert {token for token in tokenizer.convert_ids_to_tokens(ids) if len(token) > 1} - {"wörd", "  "} == named


def test_each_output_has_its_own_guide(grammars):
    first, second = compile_guides(grammars, "regex", "ab", count=2)
    first.advance([token("a")])
    assert (allowed(first), allowed(second)) == ({token("b")}, {token("a")})
    first.advance([token("b")])
    assert allowed(first) == {2, END}  # only the two EOS tokens


def test_tokens_beyond_the_model_vocabulary_are_not_allowed():
    """The tokenizer has more tokens than the model has rows."""
    few = GrammarCompiler(byte_tokenizer(), 60, frozenset([2]), seconds=WAIT)
    (guide,) = compile_guides(few, "regex", r"[\x21-\x7e]+")
    assert allowed(guide) and max(allowed(guide)) < 60
    (guide,) = compile_guides(few, "regex", "z")
    with pytest.raises(GuideError, match="regex: none of the model's tokens can come next"):
        allowed(guide)
    few.stop()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("json_schema", {"type": "array", "uniqueItems": True}, 'json_schema: Unimplemented keys: ["uniqueItems"]'),
        ("json_schema", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf: supported only if"),
        ("json_schema", {"uniqueItems": True, "x-guidance": {"lenient": True}}, "Unimplemented"),
        ("json_schema", {"type": "object", "if": {}, "then": {}}, "Unimplemented"),
        ("json_schema", {"$ref": "#/$defs/nothing"}, "json_schema: "),
        ("json_schema", {"type": "strin"}, "json_schema: "),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "(a", "regex: "),
        ("regex", r"[^\x00-\U0010FFFF]", "INVALID_ARGUMENT: regex: no text can match it"),
        ("grammar", "start: A\nA: /a/ & /b/", "grammar: no text can match it"),
        ("grammar", "start: a\na: a", "grammar: no text can match it"),
        ("grammar", 'start: "a" <|nope|>', 'grammar: at 1(8): unknown special token: "<|nope|>" 1 | start'),
        ("grammar", "start: <[320]>", "Token range end too large: 320"),
        ("structured_outputs", {"json": {}, "whitespace_pattern": "["}, "structured_outputs.json: regex parse error"),
        ("grammar", 'root ::= "a" | b', "Rule 'b' not found"),
        ("grammar", "start: ((((", "grammar: "),
        ("grammar", "start: x\nx[temperature=0.5]: /a+/", "cannot set `temperature`"),
        ("structured_outputs", {"regex": "(a"}, "structured_outputs.regex: "),
        ("grammar", DEEP, "grammar: it is too deep or too large to be compiled"),
        ("grammar", AMBIGUOUS, "Too many items (limit 5000; mask)"),  # llguidance's default limit is ten times that
    ],
)
def test_invalid_structure_is_rejected_with_the_reason(grammars, name, value, message):
    error = compile_guides(grammars, name, value)
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert message in str(error)
    assert len(str(error)) < 500


def test_mask_that_exceeds_its_limits_fails_the_guide(grammars):
    """llguidance's default limits would allow these 72 characters."""
    (guide,) = compile_guides(grammars, "regex", "(([ab]{1,30}a){1,30}b){1,30}c")

    def advance(text):
        for char in text:
            assert allowed(guide)
            guide.advance([token(char)])

    with pytest.raises(GuideError, match="regex: cannot continue: lexer error: too many expressions constructed"):
        advance("ab" * 36)


def test_compile_timeout_does_not_block_other_grammars(monkeypatch):
    grammars = create_compiler(seconds=1.5)
    slow = [SimpleQueue() for _ in range(3)]
    for answers in slow:
        grammars.compile(read_structure("json_schema", SLOW), 1, answers.put)  # equal structures are compiled once
    assert accepts(compile_guides(grammars, "regex", "a"), "a")
    assert all(answers.empty() for answers in slow)
    for answers in slow:
        error = answers.get(timeout=WAIT)
        assert str(error) == (
            "INVALID_ARGUMENT: json_schema: compiling it takes more than 1.5 s (structured_outputs_timeout)"
        )
    assert accepts(compile_guides(grammars, "regex", "b"), "b")
    grammars.stop()


def test_failure_to_create_guides_affects_only_its_request(monkeypatch):
    grammars, answers, create_guide = create_compiler(), [SimpleQueue() for _ in range(3)], compiler.GrammarGuide
    compiling, resume, compile = threading.Event(), threading.Event(), grammars._compile

    def compile_slowly(key):
        compiling.set()
        assert resume.wait(WAIT)
        return compile(key)

    fails = iter([RuntimeError("no memory"), None, None])

    def fail_once(*args):
        if error := next(fails):
            raise error
        return create_guide(*args)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    monkeypatch.setattr(compiler, "GrammarGuide", fail_once)
    for queue in answers:
        grammars.compile(read_structure("regex", "a"), 1, queue.put)
    assert compiling.wait(WAIT)
    resume.set()
    first, *others = [queue.get(timeout=WAIT) for queue in answers]
    assert str(first) == "INTERNAL: RuntimeError: no memory"
    assert all(accepts(guides, "a") for guides in others)
    grammars.stop()


def test_timed_out_grammar_is_not_retried_immediately(monkeypatch):
    grammars = create_compiler(seconds=0.3)
    compiled = record_compilations(monkeypatch, grammars)
    first, second = (str(compile_guides(grammars, "json_schema", SLOW)) for _ in range(2))
    assert "compiling it takes more than 0.3 s" in first
    assert (first, len(compiled)) == (second, 1)
    monkeypatch.setattr(compiler.time, "monotonic", lambda now=time.monotonic: now() + TIMEOUT_CACHE_SECONDS)
    assert str(compile_guides(grammars, "json_schema", SLOW)) == first
    assert len(compiled) == 2, "it is retried after a while, because the machine may have been busy"
    grammars.stop()


def test_dead_sandbox_process_is_replaced():
    grammars = create_compiler()
    assert accepts(compile_guides(grammars, "regex", "a"), "a")
    for sandbox in grammars._sandboxes:
        if sandbox._process:
            sandbox._process.kill()
            sandbox._process.wait()
    assert accepts(compile_guides(grammars, "regex", "b"), "b")
    assert "too deep" in str(compile_guides(grammars, "grammar", DEEP))
    assert accepts(compile_guides(grammars, "regex", "c"), "c")
    grammars.stop()


def test_stop_fails_queued_compilations():
    grammars, answers = create_compiler(), SimpleQueue()
    for minimum in range(4):
        grammars.compile(read_structure("json_schema", SLOW | {"minimum": minimum}), 1, answers.put)
    grammars.stop()
    assert {str(answers.get(timeout=WAIT)) for _ in range(4)} == {"UNAVAILABLE: json_schema: the server is stopping"}


def test_full_compile_queue_rejects_requests():
    grammars, answers = create_compiler(input_limits=InputLimits(max_queued_structures=2)), SimpleQueue()
    for minimum in range(2):
        grammars.compile(read_structure("json_schema", SLOW | {"minimum": minimum}), 1, answers.put)
    error = compile_guides(grammars, "regex", "a")
    assert error.code is ErrorCode.UNAVAILABLE
    assert str(error) == (
        "UNAVAILABLE: regex: 2 structures are queued, which is max_queued_structures; try again later"
    )
    grammars.stop()


@pytest.mark.parametrize("limit", [{"max_remembered_structures": 3}, {"max_remembered_structure_bytes": 30}])
def test_cache_is_lru_and_bounded(monkeypatch, limit):
    grammars = create_compiler(input_limits=InputLimits(**limit))
    keys = record_compilations(monkeypatch, grammars)

    def compiled():
        return [text for _, text, _ in keys]

    first, *others = (f"[a-c]{{{index}}}xx" for index in range(1, 5))  # ten bytes each
    for expression in (first, first, others[0], others[1], first, others[2], first):
        assert compile_guides(grammars, "regex", expression)
    assert compiled() == [first, *others]  # the most recently used entry stays
    compile_guides(grammars, "regex", others[0])
    assert compiled() == [first, *others, others[0]]
    compile_guides(grammars, "regex", "(a")
    compile_guides(grammars, "regex", "(a")  # errors are cached as well
    assert compiled().count("(a") == 1
    grammars.stop()


def test_cache_is_separate_per_tenant(monkeypatch):
    """Compile times must not reveal what other tenants use, so results, errors and queue entries are per tenant."""
    grammars = create_compiler()
    compiled = record_compilations(monkeypatch, grammars)
    answers = SimpleQueue()
    for tenant in ("a", "b", "", "a", "b", ""):
        for expression in ("known", "(a"):
            grammars.compile(read_structure("regex", expression), 1, answers.put, tenant=tenant)
    for _ in range(12):
        answers.get(timeout=WAIT)
    assert sorted(compiled) == sorted(("regex", text, tenant) for text in ("known", "(a") for tenant in ("a", "b", ""))
    grammars.stop()


def test_cache_hit_calls_back_on_the_calling_thread(grammars):
    compile_guides(grammars, "regex", "known")
    threads = []
    grammars.compile(read_structure("regex", "known"), 1, lambda guides: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]


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
    tokens = {tokenizer.convert_ids_to_tokens([int(index)])[0] for index in allowed(guide)}
    assert tokens == {"▁", "▁a", "▁ab", "<0x20>"}
    guide.advance([ids["▁ab"]])
    assert allowed(guide) == {ids[word] for word in ("a", "b", "<0x61>", "<0x62>", "<0xC3>")}
    guide.advance([ids["<0xC3>"], ids["<0xA9>"]])
    assert allowed(guide) == {ids["</s>"]}
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
