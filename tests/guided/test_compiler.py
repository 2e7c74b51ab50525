"""What outputs may be asked to look like: how that is read, compiled beside everything else, bounded, remembered."""

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
from paged_backend.api.limits import EngineLimits, InputLimits
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.structures import read_structure
from paged_backend.guided import compiler
from paged_backend.guided.compiler import GrammarCompiler
from paged_backend.guided.sandbox import TIMEOUT_CACHE_SECONDS
from tests.support.grammars import SLOW
from tests.support.in_process import WAIT, byte_tokenizer

VOCAB, END = 320, 256
DEEP = "start: r0\n" + "\n".join(f"r{index}: r{index + 1}" for index in range(4000)) + '\nr4000: "a"'  # ends a process
LETTERS = " | ".join(f'"{char}"' for char in "abcdefghijklmnopqrstuvwxyz")
AMBIGUOUS = "start: " + " | ".join(f"r{index}" for index in range(8)) + "\n"
AMBIGUOUS += "\n".join(f"r{index}: r{index} r{index} | {LETTERS}" for index in range(8))
LIMITS = EngineLimits(max_model_len=64, vocab_size=VOCAB, num_blocks=8, block_size=16, max_num_seqs=4)


def made(**options):
    return GrammarCompiler(byte_tokenizer(), VOCAB, frozenset([2, END]), **{"seconds": WAIT} | options)


@pytest.fixture(scope="module")
def grammars():
    one = made()
    yield one
    one.stop()


def compiled(grammars, name, value, count=1):
    answers = SimpleQueue()
    grammars.compile(read_structure(name, value), count, answers.put)
    return answers.get(timeout=WAIT)


def token(char):
    (found,) = byte_tokenizer().encode(char)
    return found


def allowed(guide):
    words = np.zeros(guide.num_words, dtype=np.int32)
    guide.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))


def fits(guides, text):
    """Whether a whole output of this text may be drawn, token by token, and end."""
    (guide,) = guides
    for one in byte_tokenizer().encode(text):
        if one not in allowed(guide):
            return False
        guide.advance([one])
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
        assert fits(compiled(grammars, name, value), text), text
    for text in bad:
        assert not fits(compiled(grammars, name, value), text), text


def test_disable_any_whitespace():
    one = made(any_whitespace=False)
    own = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    assert fits(compiled(one, "json_object", True), '{"a":1}')
    assert not fits(compiled(one, "json_object", True), '{"a": 1}')
    assert fits(compiled(one, "json_schema", own), '{"a": 1}')
    one.stop()


def test_grammars_can_name_special_tokens_and_ids():
    """Those of a real tokenizer, whose first ids are special ones."""
    directory = default_directory()
    if not directory.exists():
        pytest.skip("make demo-model has not been run")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    one = GrammarCompiler(tokenizer, 49_152, frozenset([2]), seconds=WAIT)
    (guide,) = compiled(one, "grammar", "start: <|im_start|> /[0-9]/ <[300-302]> <repo_name>")
    for expected, drawn in (({1}, 1), (set(tokenizer.convert_tokens_to_ids(list("0123456789"))), None)):
        assert allowed(guide) == expected
        guide.advance([drawn or min(expected)])
    assert allowed(guide) == {300, 301, 302}
    guide.advance([301])
    assert allowed(guide) == {3}
    assert 'unknown special token: "<|im_stop|>"' in str(compiled(one, "grammar", "start: <|im_stop|>"))
    assert "Token range end too large: 49152" in str(compiled(one, "grammar", "start: <[49152]>"))
    one.stop()


NAMED = {
    "type": "object",
    "properties": {"<|end|>": {"enum": ["[PAD]<s>"]}},
    "required": ["<|end|>"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def added():
    """A tokenizer that makes one token of some texts, and changes others, and grammars for it."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    special = [AddedToken(text, special=True, normalized=False) for text in ("[PAD]", "<s>")]
    plain = [AddedToken(text, special=False) for text in ("<think>", "wörd", "  ")]
    tokenizer.add_tokens([*special, *plain, AddedToken("<mask>", special=True, lstrip=True, normalized=False)])
    one = GrammarCompiler(tokenizer, VOCAB, frozenset([END]), seconds=WAIT)
    yield tokenizer, one
    one.stop()


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
    """But where a grammar names them outside of quotation marks."""
    tokenizer, grammars = added
    (guide,) = compiled(grammars, name, value)
    drawn = []
    while END not in (left := allowed(guide)) and len(drawn) < 99:
        drawn.append(min(left))
        guide.advance(drawn[-1:])
    assert tokenizer.decode(drawn) == text
    named = {"<s>", "<think>"} if '<think> "' in str(value) else set()
    assert {one for one in tokenizer.convert_ids_to_tokens(drawn) if len(one) > 1} - {"wörd", "  "} == named


def test_each_output_has_its_own_guide(grammars):
    one, other = compiled(grammars, "regex", "ab", count=2)
    one.advance([token("a")])
    assert (allowed(one), allowed(other)) == ({token("b")}, {token("a")})
    one.advance([token("b")])
    assert allowed(one) == {2, END}  # the end alone, of either kind


def test_tokens_beyond_the_model_vocabulary_are_not_allowed():
    """Of a tokenizer with more tokens than the model has rows."""
    few = GrammarCompiler(byte_tokenizer(), 60, frozenset([2]), seconds=WAIT)
    (guide,) = compiled(few, "regex", r"[\x21-\x7e]+")
    assert allowed(guide) and max(allowed(guide)) < 60
    (guide,) = compiled(few, "regex", "z")
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
        ("grammar", AMBIGUOUS, "Too many items (limit 5000; mask)"),  # the library's own limit is ten times that
    ],
)
def test_invalid_structure_is_rejected_with_the_reason(grammars, name, value, message):
    error = compiled(grammars, name, value)
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert message in str(error)
    assert len(str(error)) < 500


def test_mask_that_exceeds_its_limits_fails_the_guide(grammars):
    """What the library allows by itself would do for the 72."""
    (guide,) = compiled(grammars, "regex", "(([ab]{1,30}a){1,30}b){1,30}c")

    def draw(text):
        for char in text:
            assert allowed(guide)
            guide.advance([token(char)])

    with pytest.raises(GuideError, match="regex: cannot continue: lexer error: too many expressions constructed"):
        draw("ab" * 36)


def test_compile_timeout_does_not_block_other_grammars(monkeypatch):
    one = made(seconds=1.5)
    slow = [SimpleQueue() for _ in range(3)]
    for answers in slow:
        one.compile(read_structure("json_schema", SLOW), 1, answers.put)  # the same one: compiled once
    assert fits(compiled(one, "regex", "a"), "a")
    assert all(answers.empty() for answers in slow)
    for answers in slow:
        error = answers.get(timeout=WAIT)
        assert str(error) == (
            "INVALID_ARGUMENT: json_schema: compiling it takes more than 1.5 s (structured_outputs_timeout)"
        )
    assert fits(compiled(one, "regex", "b"), "b")
    one.stop()


def test_failure_to_create_guides_affects_only_its_request(monkeypatch):
    one, answers, made_of = made(), [SimpleQueue() for _ in range(3)], compiler.GrammarGuide
    compiling, may_end, compile = threading.Event(), threading.Event(), one._compile

    def slowly(key):
        compiling.set()
        assert may_end.wait(WAIT)
        return compile(key)

    fails = iter([RuntimeError("no memory"), None, None])

    def sometimes(*args):
        if error := next(fails):
            raise error
        return made_of(*args)

    monkeypatch.setattr(one, "_compile", slowly)
    monkeypatch.setattr(compiler, "GrammarGuide", sometimes)
    for queue in answers:
        one.compile(read_structure("regex", "a"), 1, queue.put)
    assert compiling.wait(WAIT)
    may_end.set()
    first, *others = [queue.get(timeout=WAIT) for queue in answers]
    assert str(first) == "INTERNAL: RuntimeError: no memory"
    assert all(fits(guides, "a") for guides in others)
    one.stop()


def test_timed_out_grammar_is_not_retried_immediately(monkeypatch):
    one, tried = made(seconds=0.3), []
    monkeypatch.setattr(one, "_compile", lambda key, compile=one._compile: tried.append(key) or compile(key))
    first, second = (str(compiled(one, "json_schema", SLOW)) for _ in range(2))
    assert "compiling it takes more than 0.3 s" in first
    assert (first, len(tried)) == (second, 1)
    monkeypatch.setattr(compiler.time, "monotonic", lambda now=time.monotonic: now() + TIMEOUT_CACHE_SECONDS)
    assert str(compiled(one, "json_schema", SLOW)) == first
    assert len(tried) == 2, "then, too, the machine may have been busy"
    one.stop()


def test_dead_sandbox_process_is_replaced():
    one = made()
    assert fits(compiled(one, "regex", "a"), "a")
    for sandbox in one._sandboxes:
        if sandbox._process:
            sandbox._process.kill()
            sandbox._process.wait()
    assert fits(compiled(one, "regex", "b"), "b")
    assert "too deep" in str(compiled(one, "grammar", DEEP))
    assert fits(compiled(one, "regex", "c"), "c")
    one.stop()


def test_stop_fails_queued_compilations():
    one, answers = made(), SimpleQueue()
    for least in range(4):
        one.compile(read_structure("json_schema", SLOW | {"minimum": least}), 1, answers.put)
    one.stop()
    assert {str(answers.get(timeout=WAIT)) for _ in range(4)} == {"UNAVAILABLE: json_schema: the server is stopping"}


def test_full_compile_queue_rejects_requests():
    one, answers = made(input_limits=InputLimits(max_queued_structures=2)), SimpleQueue()
    for least in range(2):
        one.compile(read_structure("json_schema", SLOW | {"minimum": least}), 1, answers.put)
    error = compiled(one, "regex", "a")
    assert error.code is ErrorCode.UNAVAILABLE
    assert str(error) == (
        "UNAVAILABLE: regex: 2 structures are queued, which is max_queued_structures; try again later"
    )
    one.stop()


@pytest.mark.parametrize("limit", [{"max_remembered_structures": 3}, {"max_remembered_structure_bytes": 30}])
def test_cache_is_lru_and_bounded(monkeypatch, limit):
    one, tried = made(input_limits=InputLimits(**limit)), []
    monkeypatch.setattr(one, "_compile", lambda key, compile=one._compile: tried.append(key[1]) or compile(key))
    first, *others = (f"[a-c]{{{index}}}xx" for index in range(1, 5))  # ten bytes each
    for expression in (first, first, others[0], others[1], first, others[2], first):
        assert compiled(one, "regex", expression)
    assert tried == [first, *others]  # the one that was used last stays
    compiled(one, "regex", others[0])
    assert tried == [first, *others, others[0]]
    compiled(one, "regex", "(a")
    compiled(one, "regex", "(a")  # what is wrong with one, too
    assert tried.count("(a") == 1
    one.stop()


def test_cache_is_separate_per_tenant(monkeypatch):
    """A known one is there at once: known to its own tenant alone, what is wrong with it and what waits likewise."""
    one, tried = made(), []
    monkeypatch.setattr(one, "_compile", lambda key, compile=one._compile: tried.append(key[1:]) or compile(key))
    answers = SimpleQueue()
    for tenant in ("a", "b", "", "a", "b", ""):
        for expression in ("known", "(a"):
            one.compile(read_structure("regex", expression), 1, answers.put, tenant=tenant)
    for _ in range(12):
        answers.get(timeout=WAIT)
    assert sorted(tried) == sorted((text, tenant) for text in ("known", "(a") for tenant in ("a", "b", ""))
    one.stop()


def test_cache_hit_calls_back_on_the_calling_thread(grammars):
    compiled(grammars, "regex", "known")
    threads = []
    grammars.compile(read_structure("regex", "known"), 1, lambda guides: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]


def sentencepiece_tokenizer():
    """Words with a mark for the space before them, and bytes for what is no word."""
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
    one = GrammarCompiler(tokenizer, 288, frozenset([ids["</s>"]]), seconds=WAIT)
    (guide,) = compiled(one, "regex", " [ab]+é")
    drawn = {tokenizer.convert_ids_to_tokens([int(index)])[0] for index in allowed(guide)}
    assert drawn == {"▁", "▁a", "▁ab", "<0x20>"}
    guide.advance([ids["▁ab"]])
    assert allowed(guide) == {ids[word] for word in ("a", "b", "<0x61>", "<0x62>", "<0xC3>")}
    guide.advance([ids["<0xC3>"], ids["<0xA9>"]])
    assert allowed(guide) == {ids["</s>"]}
    one.stop()


@pytest.mark.parametrize(
    ("tokenizer", "eos", "message"),
    [
        (object(), {1}, "tokenizer, object, has no tokenizer.json"),
        (byte_tokenizer(), set(), "this model has no end-of-sequence token"),
    ],
)
def test_unsupported_tokenizer_is_named(tokenizer, eos, message):
    one = GrammarCompiler(tokenizer, VOCAB, frozenset(eos), seconds=WAIT)
    error = compiled(one, "regex", "a")
    assert str(error).startswith("INVALID_ARGUMENT: regex: not available")
    assert message in str(error)
    one.stop()


def parse(**values):
    return SamplingParams.parse(values, LIMITS).structure


def test_null_and_false_mean_no_structure():
    nothing = {"json": None, "regex": None, "json_object": False, "disable_any_whitespace": False, "_backend": None}
    for name in ("json_schema", "json_object", "regex", "choice", "grammar", "structured_outputs"):
        assert parse(**{name: None}) is None
    assert parse(structured_outputs=nothing) is None
    assert parse(guided_decoding=nothing | {"backend": None, "backend_was_auto": False}) is None
    assert parse(json_object=False) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"json_schema": 5}, "json_schema=5: must be a JSON schema: an object, or a string that holds one"),
        ({"json_schema": "{"}, 'json_schema="{": is not valid JSON'),
        ({"json_schema": "[1]"}, "must be a JSON schema"),
        ({"json_schema": '{"a": ' * 5000}, "is not valid JSON"),
        ({"json_schema": {"maximum": float("inf")}}, "cannot be written as JSON"),
        ({"json_object": 1}, "json_object=1: must be true or false"),
        ({"regex": ""}, 'regex="": must be a string that is not empty'),
        ({"regex": ["a"]}, "must be a string"),
        ({"regex": "\ud800"}, "contains an unpaired surrogate"),
        ({"grammar": " "}, "must be a string that is not blank"),
        ({"choice": "a"}, "must be a list of strings, none of them empty"),
        ({"choice": []}, "must be 1..1024 strings"),
        ({"choice": ["a"] * 1025}, "must be 1..1024 strings"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"regex": "a" * (InputLimits.max_structure_bytes + 1)}, "has 65537 bytes; must be at most 65536"),
        ({"choice": ["é" * 40000]}, "must be at most 65536"),
        ({"structured_outputs": 1}, "must be an object"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "has json and regex; give one of them"),
        ({"structured_outputs": {"disable_fallback": True}}, "disable_fallback is not supported; leave it out"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "whitespace_pattern: has no effect without json or json"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "disable_any_whitespace: give one of them, together with json or json_object",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}},
            "disable_any_whitespace and whitespace_pattern: give one of them, together with json",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": 1}},
            "whitespace_pattern=1: must be a string",
        ),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": "1"}}, "must be true or false"),
        ({"structured_outputs": {"json": {"x-guidance": 5}, "whitespace_pattern": " "}}, "x-guidance: must be an obj"),
        ({"structured_outputs": {"json": 5}}, "json: must be a JSON schema"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice: each sets the form of the output; give one"),
        ({"regex": "a", "beam_width": 2}, "beam_width=2: must be 1 with regex"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "must be false with structured_outputs.regex"),
    ],
)
def test_invalid_structures_are_named(values, message):
    with pytest.raises(RequestError) as raised:
        parse(**values)
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT
    assert message in str(raised.value)
