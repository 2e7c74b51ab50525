"""Compare libraries for structured outputs: supported features, time per mask, start and compile time, hard cases.

Ours is llguidance, with the limits of the engine. Times are CPU times. A feature is enforced ("held to") if all
matching texts can be generated and the others cannot.

Each feature has texts that match and texts that do not.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer

from paged_bench._harness import (
    Bars,
    Benchmark,
    Option,
    Record,
    alternate,
    count,
    figures,
    model_option,
    not_measured,
    rounds_option,
)
from paged_client.serving.repository import resolve_model

OURS, PEER = "llguidance", "xgrammar"
MAX_BYTES = 6 << 30  # address space of a process that runs a hard case
HELD, REFUSED, IGNORED, STRICT = "held to", "refused", "ignored", "too strict"


# --- cases ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    name: str
    kind: str  # a value of Structure.kind
    text: str
    good: tuple[str, ...]
    bad: tuple[str, ...]


def _schema(name: str, schema: dict[str, Any], good: list[Any], bad: list[Any]) -> Case:
    return Case(name, "json_schema", json.dumps(schema), _written(good), _written(bad))


def _written(values: list[Any]) -> tuple[str, ...]:
    return tuple(json.dumps(value, ensure_ascii=False) for value in values)


def _of(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties} | more


_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
_NODE = _of({"v": _WHOLE, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, required=["v", "next"])

SCHEMAS = [
    _schema("type", {"type": "boolean"}, [True], [1, "true"]),
    _schema("several types", {"type": ["string", "null"]}, ["a", None], [1]),
    _schema("enum", {"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
    _schema("const", {"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}, {}]),
    _schema("minLength", {"type": "string", "minLength": 2}, ["ab"], ["a"]),
    _schema("maxLength", {"type": "string", "maxLength": 2}, ["ab", "éé"], ["abc"]),
    _schema("pattern", {"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", ""]),
    _schema("pattern, not anchored", {"type": "string", "pattern": "b"}, ["abc", "b"], ["ac"]),
    _schema("pattern and maxLength", {"type": "string", "pattern": "^a+$", "maxLength": 3}, ["aaa"], ["aaaa", "b"]),
    _schema("format date", {"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "a"]),
    _schema("format uuid", {"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e"]),
    _schema("format email", {"type": "string", "format": "email"}, ["a@b.org"], ["a", "@"]),
    _schema("unknown format", {"type": "string", "format": "moon-phase"}, [], []),
    _schema("minimum", {"type": "integer", "minimum": 10}, [10, 123], [9, -1]),
    _schema("maximum", {"type": "integer", "maximum": 10}, [10, -50], [11]),
    _schema("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1], [0, 1.5]),
    _schema("multipleOf", {"type": "integer", "multipleOf": 5}, [10, 0], [7]),
    _schema("items", {"type": "array", "items": _WHOLE}, [[1, 2], []], [["a"]]),
    _schema("minItems, maxItems", {"type": "array", "minItems": 1, "maxItems": 2}, [[1]], [[], [1] * 3]),
    _schema("prefixItems", {"type": "array", "prefixItems": [_WHOLE, _TEXT]}, [[1, "a"]], [["a"], [1, 2]]),
    _schema("uniqueItems", {"type": "array", "items": _WHOLE, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    _schema("contains", {"type": "array", "contains": {"const": 1}}, [[0, 1]], [[0], []]),
    _schema("required", _of({"a": _WHOLE, "b": _WHOLE}, required=["a"]), [{"a": 1}, {"a": 1, "b": 2}], [{"b": 2}]),
    _schema("additionalProperties false", _of({"a": _WHOLE}, additionalProperties=False), [{"a": 1}], [{"c": 1}]),
    _schema("additionalProperties", _of({"a": _WHOLE}, additionalProperties=_TEXT), [{"a": 1, "c": "x"}], [{"c": 1}]),
    _schema("patternProperties", {"type": "object", "patternProperties": {"^x": _WHOLE}}, [{"x1": 1}], [{"x1": "a"}]),
    _schema("propertyNames", {"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    _schema("minProperties", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    _schema("maxProperties", {"type": "object", "maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
    _schema("dependentRequired", _of({"a": _WHOLE}, dependentRequired={"a": ["b"]}), [{"a": 1, "b": 1}], [{"a": 1}]),
    _schema("anyOf", {"anyOf": [_WHOLE, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", None]),
    _schema("oneOf, disjoint", {"oneOf": [_WHOLE, _TEXT]}, [1, "a"], [None]),
    _schema("oneOf, overlapping", {"oneOf": [{"type": "number"}, _WHOLE]}, [1.5], [1]),
    _schema("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [4], [6, 2]),
    _schema("not", {"not": _TEXT}, [1], ["a"]),
    _schema("if, then", {"if": _TEXT, "then": {"maxLength": 1}}, ["a", 5], ["ab"]),
    _schema("$ref", {"$ref": "#/$defs/t", "$defs": {"t": _WHOLE}}, [1], ["a"]),
    _schema(
        "$ref, recursive", {"$ref": "#/$defs/n", "$defs": {"n": _NODE}},
        [{"v": 1, "next": {"v": 2, "next": None}}], [{"v": 1, "next": 2}],
    ),
]  # fmt: skip
EXPRESSIONS = [
    Case("classes and counts", "regex", r"[a-f]{2,3}-\d+", ("ab-1", "abc-22"), ("a-1", "abcd-1", "ab-")),
    Case("alternatives", "regex", r"(yes|no)( please)?", ("yes", "no please"), ("yesno", "please")),
    Case("shorthands of Unicode", "regex", r"\w+\s\S", ("né x",), ("né",)),
    Case("lazy counts", "regex", r"a*?b", ("aab", "b"), ("a",)),
    Case("letters of any case", "regex", r"(?i)ab", ("AB", "aB"), ("c",)),
    Case("anchors", "regex", r"^ab$", ("ab",), ("abc",)),
    Case("look-ahead", "regex", r"a(?=b)b", ("ab",), ("a",)),
    Case("back-references", "regex", r"([ab])\1", ("aa",), ("ab",)),
]
GRAMMARS = [
    Case("EBNF", "grammar", 'root ::= num ("+" num)*\nnum ::= [0-9]+', ("1+22",), ("1+", "+")),
    Case("EBNF, recursive", "grammar", 'root ::= "(" root ")" | "x"', ("((x))",), ("((x)",)),
    Case("EBNF, counts", "grammar", 'root ::= "a"{2,3} [^b]?', ("aa", "aaac"), ("a", "aab")),
    Case("Lark", "grammar", 'start: num ("+" num)*\nnum: /[0-9]+/', ("1+22",), ("1+",)),
]

PERSON = _of(
    {
        "name": _TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": _of(
            {"street": {"type": "string", "maxLength": 40}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            required=["street", "zip"], additionalProperties=False,
        ),
    },
    required=["name", "age", "tags", "address"], additionalProperties=False,
)  # fmt: skip
_GIVEN = ("Ada King Lovelace, 1815-12-10",)
_ADDED = ("12 + 345 * 6 + 7890 * 11",)
_ADDRESS = {"street": "St James's Square 12", "zip": "01234"}
ONE = {"name": "Ada Lovelace", "age": 36, "tags": ["red", "blue"], "address": _ADDRESS}
# The text that is generated while masks are timed.
SPEED = [
    Case("a schema", "json_schema", json.dumps(PERSON), (json.dumps(ONE),), ()),
    Case("any JSON", "json_schema", '{"type": "object"}', (json.dumps(ONE),), ()),
    Case("an expression", "regex", r"[A-Z][a-z]+( [A-Z][a-z]+){1,3}, [0-9]{4}-[0-9]{2}-[0-9]{2}", _GIVEN, ()),
    Case("a grammar", "grammar", 'root ::= num (op num)*\nop ::= " + " | " * "\nnum ::= [0-9]+', _ADDED, ()),
]  # fmt: skip


def _chain(count: int) -> str:
    rules = (f"r{index} ::= r{index + 1}" for index in range(count))
    return "\n".join(("root ::= r0", *rules, f'r{count} ::= "a"'))


_PAIRS = "\n".join(f"r{index} ::= r{index + 1} r{index + 1}" for index in range(40))
_PATTERNS = {"type": "string", "allOf": [{"pattern": f"a.{{{number}}}b"} for number in range(10, 30)]}
HARD = [
    Case("a multiple of 999,983", "json_schema", '{"type": "integer", "multipleOf": 999983}', (), ()),
    Case("1,000 properties", "json_schema", json.dumps(_of({f"p{number}": _TEXT for number in range(1000)})), (), ()),
    Case("5,000 values", "json_schema", json.dumps({"enum": [f"value {number}" for number in range(5000)]}), (), ()),
    Case("20 patterns at once", "json_schema", json.dumps(_PATTERNS), (), ()),
    Case("a million repetitions", "regex", "(abc){1,1000000}", (), ()),
    Case("repetitions within repetitions", "regex", "((a{1,1000}){1,1000}){1,1000}", (), ()),
    Case("exponential automaton", "regex", "(a|b)*a(a|b){200}", (), ()),
    Case("rules that double, 40 times", "grammar", f'root ::= r0\n{_PAIRS}\nr40 ::= "a"', (), ()),
    Case("4,000 rules, each in the one before", "grammar", _chain(4000), (), ()),
    Case("an ambiguous grammar", "grammar", 'root ::= x\nx ::= x x x | x x | "a"', ("a" * 60,), ()),
]  # fmt: skip


# --- libraries -----------------------------------------------------------------------------------------------------


class Llguidance:
    """llguidance, used as in the engine."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        from paged_backend.guided.tokenizer import llguidance_tokenizer

        self._tokenizer = llguidance_tokenizer(tokenizer, vocab_size, [tokenizer.eos_token_id])

    def compile(self, case: Case) -> Callable[[], Any]:
        """Return a function that creates a matcher. Raises the library's error for an unsupported case."""
        from paged_backend.guided.grammar import build_grammar, create_matcher

        return create_matcher(self._tokenizer, build_grammar(case.kind, case.text)).deep_copy

    @staticmethod
    def fill(matcher: Any, row: np.ndarray) -> None:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

    @staticmethod
    def accept(matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))


class Xgrammar:
    """xgrammar, with additional properties of objects allowed, as in JSON Schema."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._matcher = xgrammar.GrammarMatcher
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, case: Case) -> Callable[[], Any]:
        if case.kind == "json_schema":
            compiled = self._compiler.compile_json_schema(case.text, strict_mode=False)
        elif case.kind == "regex":
            compiled = self._compiler.compile_regex(case.text)
        elif case.text.startswith("start:"):
            compiled = self._compiler.compile_lark(case.text)
        else:
            compiled = self._compiler.compile_grammar(case.text)
        return lambda: self._matcher(compiled)

    @staticmethod
    def fill(matcher: Any, row: np.ndarray) -> None:
        import torch

        matcher.fill_next_token_bitmask(torch.from_numpy(row[None]), 0)

    @staticmethod
    def accept(matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))


LIBRARIES: dict[str, Callable[[Any, int], Any]] = {OURS: Llguidance, PEER: Xgrammar}


def support(library: Any, tokenizer: Any, words: int, case: Case) -> str:
    """Return how a library supports the feature of a case: HELD, REFUSED, IGNORED or STRICT."""
    try:
        make_matcher = library.compile(case)
    except Exception:
        return REFUSED
    if not all(matches(library, make_matcher(), tokenizer, words, text) for text in case.good):
        return STRICT
    accepts_bad = any(matches(library, make_matcher(), tokenizer, words, text) for text in case.bad)
    return IGNORED if accepts_bad or not case.bad else HELD


def matches(library: Any, matcher: Any, tokenizer: Any, words: int, text: str) -> bool:
    """Return whether a text is a possible output, up to the end of sequence."""
    row = np.zeros(words, dtype=np.int32)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not library.accept(matcher, token):
            return False
    library.fill(matcher, row)
    end = tokenizer.eos_token_id
    return bool(row.view(np.uint32)[end // 32] >> np.uint32(end % 32) & 1)


def mask_time(library: Any, tokenizer: Any, words: int, case: Case, batch: int) -> Callable[[], float]:
    """Return a function that measures the microseconds per row of a step: computing a mask and accepting a token.

    Each row is at another position of the text.
    """
    tokens = tokenizer.encode(case.good[0], add_special_tokens=False)
    make_matcher, rows = library.compile(case), np.zeros((batch, words), dtype=np.int32)

    def once() -> float:
        matchers = []
        for row in range(batch):
            matchers.append(make_matcher())
            for token in tokens[: row % len(tokens)]:
                library.accept(matchers[-1], token)
        seconds, num_tokens = 0.0, 0
        for step in range(len(tokens)):
            started = time.process_time()
            for row, matcher in enumerate(matchers):
                place = row % len(tokens) + step
                if place < len(tokens):
                    library.fill(matcher, rows[row])
                    library.accept(matcher, tokens[place])
                    num_tokens += 1
            seconds += time.process_time() - started
        return seconds / num_tokens * 1e6

    return once


def compile_time(library: Any, case: Case) -> float:
    """Return the milliseconds to compile a case and create a matcher."""
    started = time.process_time()
    library.compile(case)()
    return (time.process_time() - started) * 1e3


def hard(name: str, model: str, vocab_size: int, case: Case, seconds: int) -> tuple[float, str, float]:
    """Run a hard case in a subprocess. Return its CPU seconds, its result and the megabytes that it used."""
    command = [sys.executable, "-c", f"from {__name__} import run_hard_case; run_hard_case()"]
    arguments = json.dumps([name, model, vocab_size, list(case), seconds])
    completed = subprocess.run(command, input=arguments, capture_output=True, text=True)
    if completed.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return seconds, f"more than {seconds} s", 0.0
    if completed.returncode:
        return 0.0, f"ended the process ({completed.returncode})", 0.0
    used, result, megabytes = json.loads(completed.stdout.splitlines()[-1])
    return used, result, megabytes


def run_hard_case() -> None:
    """Run a case in the subprocess of `hard`: compile it, and compute the masks of its text."""
    name, model, vocab_size, fields, seconds = json.loads(sys.stdin.read())
    case, tokenizer = Case(*fields), AutoTokenizer.from_pretrained(model)
    library = LIBRARIES[name](tokenizer, vocab_size)
    before, limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, int(time.process_time()) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    started, result = time.process_time(), "compiled"
    try:
        _generate_text(library, library.compile(case)(), tokenizer, vocab_size, case)
    except Exception:
        result = REFUSED
    used = time.process_time() - started
    print(json.dumps([used, result, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024]), flush=True)


def _generate_text(library: Any, matcher: Any, tokenizer: Any, vocab_size: int, case: Case) -> None:
    row = np.zeros(vocab_size // 32, dtype=np.int32)
    library.fill(matcher, row)
    for token in tokenizer.encode(case.good[0], add_special_tokens=False) if case.good else ():
        library.accept(matcher, token)
        library.fill(matcher, row)


# --- the benchmark -------------------------------------------------------------------------------------------------


def coverage(what: str, cases: Sequence[Case], name: str, library: Any, tokenizer: Any, words: int) -> Iterator[Record]:
    by_result: dict[str, list[str]] = {HELD: [], REFUSED: [], IGNORED: [], STRICT: []}
    for case in cases:
        by_result[support(library, tokenizer, words, case)].append(case.name)
    for result, names in by_result.items():
        listed = f" ({', '.join(names)})" if names and result is not HELD else ""
        yield Record(f"{what} {result}: {name}", len(names), f"of {len(cases)}{listed}")


def compare(
    what: str, unit: str, rounds: int, contestants: Mapping[str, Callable[[], float]], *, warm_up: bool
) -> Iterator[Record]:
    contest = alternate(contestants, rounds, warm_up=warm_up)
    yield Record(what, contest.medians[OURS], unit, peers=contest.medians)
    if PEER in contestants:
        yield contest.ratio(f"{what}: {PEER} takes", PEER, OURS)


def measure(args: Namespace) -> Iterator[Record]:
    model = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    vocab_size = -(-len(tokenizer) // 32) * 32
    words, libraries = vocab_size // 32, dict[str, Any]()
    for name, start in LIBRARIES.items():
        started = time.perf_counter()
        try:
            libraries[name] = start(tokenizer, vocab_size)
            yield Record(f"start: {name}", time.perf_counter() - started, "s")
        except ImportError as error:
            yield not_measured(name, f"{error}")
    print(f"vocabulary of {vocab_size}")
    for what, cases in (("JSON Schema", SCHEMAS), ("regular expressions", EXPRESSIONS), ("grammars", GRAMMARS)):
        for name, library in libraries.items():
            yield from coverage(what, cases, name, library, tokenizer, words)
    for case in SPEED:
        compiling = {name: partial(compile_time, library, case) for name, library in libraries.items()}
        yield from compare(f"compile {case.name}", "ms", args.rounds, compiling, warm_up=False)
        for batch in args.batches:
            masks = {name: mask_time(library, tokenizer, words, case, batch) for name, library in libraries.items()}
            yield from compare(f"a token of {case.name}, {batch} rows", "us", args.rounds, masks, warm_up=True)
    for case in HARD[: args.hard]:
        for name in libraries:
            print(f"{case.name}: {name} ...", end=" ", file=sys.stderr, flush=True)
            used, result, megabytes = hard(name, model, vocab_size, case, args.seconds)
            print(f"{used:.4g} s, {result}", file=sys.stderr, flush=True)
            yield Record(f"{case.name}: {name}", used, f"s, {result}", peers={"MB": megabytes})


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    covered = {}
    for result in (HELD, REFUSED, STRICT, IGNORED):
        for name, value in figures(records, f"JSON Schema {result}: (.*)").items():
            covered[f"{name}: {result}"] = value
    yield Bars(f"{len(SCHEMAS)} features of JSON Schema", covered, grey=[name for name in covered if PEER in name])
    most = max(figures(records, "a token of a schema, ([0-9]+) rows"), key=int, default="0")
    for title, pattern in (
        ("to compile, ms", "compile ([^:]*)"),
        (f"a token's mask among {most} rows, µs", f"a token of (.*), {most} rows"),
    ):
        shown: dict[str, float] = {}
        for record in records:
            for case in figures([record], pattern) if record.peers else ():
                shown |= {f"{case}: {who}": value for who, value in record.peers.items()}
        yield Bars(title, shown, grey=[name for name in shown if PEER in name])


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option(help="Hugging Face model directory with the tokenizer to use"),
        Option("--batches", "batch sizes of a step", [1, 16, 64], type=count, nargs="+"),
        rounds_option(5),
        Option("--hard", "number of hard cases (default: all; --quick: none)", len(HARD), type=int),
        Option("--seconds", "CPU time limit of a hard case", 10),
    ),
    quick={"rounds": 2, "batches": [1, 16], "hard": 0},
)
