"""Compare libraries for structured outputs: supported features, time per mask, start and compile time, hard cases.

Ours is llguidance, with the limits of the engine. Times are CPU times. A feature is enforced ("held to") if all
matching texts can be generated and the others cannot.
"""

from __future__ import annotations

import json
import resource
import signal
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from paged_bench._guided_cases import EXPRESSIONS, GRAMMARS, HARD, SCHEMAS, SPEED, Case
from paged_bench._report import Record, Records, alternate, arguments, count, not_measured, parser, publish, ratio
from paged_client.serving.repository import resolve_model

OURS, PEER = "llguidance", "xgrammar"
MAX_BYTES = 6 << 30  # address space of a process that runs a hard case
HELD, REFUSED, IGNORED, STRICT = "held to", "refused", "ignored", "too strict"


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


def masks(library: Any, tokenizer: Any, words: int, case: Case, batch: int) -> Callable[[], float]:
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

    once()
    return once


def compiling(library: Any, case: Case) -> Callable[[], float]:
    """Return a function that measures the milliseconds to compile a case and create a matcher."""

    def once() -> float:
        started = time.process_time()
        library.compile(case)()
        return (time.process_time() - started) * 1e3

    return once


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


def _start(name: str, tokenizer: Any, vocab_size: int) -> tuple[Any, float]:
    """Return a library and the seconds that it takes to start."""
    started = time.perf_counter()
    library = LIBRARIES[name](tokenizer, vocab_size)
    return library, time.perf_counter() - started


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"rounds": 2, "batches": [1, 16], "hard": 0})
    model = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    vocab_size = -(-len(tokenizer) // 32) * 32
    libraries: dict[str, Any] = {}
    records = Records(args)
    for name in LIBRARIES:
        try:
            libraries[name], seconds = _start(name, tokenizer, vocab_size)
            records.append(Record(f"start: {name}", seconds, "s"))
        except ImportError as error:
            records.append(not_measured(name, f"{error}"))
    print(f"vocabulary of {vocab_size}")
    for what, cases in (("JSON Schema", SCHEMAS), ("regular expressions", EXPRESSIONS), ("grammars", GRAMMARS)):
        records += _coverage(what, cases, libraries, tokenizer, vocab_size // 32)
    for case in SPEED:
        records += _compare(
            f"compile {case.name}", "ms", args.rounds, {n: compiling(o, case) for n, o in libraries.items()}
        )
        for batch in args.batches:
            timed = {n: masks(o, tokenizer, vocab_size // 32, case, batch) for n, o in libraries.items()}
            records += _compare(f"a token of {case.name}, {batch} rows", "us", args.rounds, timed)
    for case in HARD[: args.hard]:
        for name in libraries:
            print(f"{case.name}: {name} ...", end=" ", file=sys.stderr, flush=True)
            used, result, megabytes = hard(name, model, vocab_size, case, args.seconds)
            print(f"{used:.4g} s, {result}", file=sys.stderr, flush=True)
            records.append(Record(f"{case.name}: {name}", used, f"s, {result}", peers={"MB": megabytes}))
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _coverage(what: str, cases: Sequence[Case], libraries: dict[str, Any], tokenizer: Any, words: int) -> list[Record]:
    records = []
    for name, library in libraries.items():
        found: dict[str, list[str]] = {HELD: [], REFUSED: [], IGNORED: [], STRICT: []}
        for case in cases:
            found[support(library, tokenizer, words, case)].append(case.name)
        for result, names in found.items():
            listed = f" ({', '.join(names)})" if names and result is not HELD else ""
            records.append(Record(f"{what} {result}: {name}", len(names), f"of {len(cases)}{listed}"))
    return records


def _compare(what: str, unit: str, rounds: int, contestants: dict[str, Callable[[], float]]) -> list[Record]:
    figures = alternate(contestants, rounds)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    records = [Record(what, medians[OURS], unit, peers=medians)]
    return [*records, ratio(f"{what}: {PEER} takes", figures[PEER], figures[OURS])] if PEER in figures else records


def _parser() -> ArgumentParser:
    made = parser("guided", __doc__)
    add = made.add_argument
    add("--model", default="demo", help="Hugging Face model directory with the tokenizer to use (default: demo)")
    add(
        "--batches",
        type=count,
        nargs="+",
        default=[1, 16, 64],
        metavar="N",
        help="batch sizes of a step (default: 1 16 64)",
    )
    add("--rounds", type=count, default=5, metavar="N", help="number of rounds (default: 5)")
    add("--hard", type=int, default=len(HARD), metavar="N", help="number of hard cases (default: all; --quick: none)")
    add("--seconds", type=count, default=10, metavar="N", help="CPU time limit of a hard case (default: 10)")
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    value = {record.name: record for record in records}
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    covered, compiled, masked = figure.subplots(1, 3)
    names = [name for name in (OURS, PEER) if f"JSON Schema {HELD}: {name}" in value]
    left = np.zeros(len(names))
    for result, colour in ((HELD, "#76b900"), (REFUSED, "#b0b0b0"), (STRICT, "#e0c060"), (IGNORED, "#c04040")):
        counts = [value[f"JSON Schema {result}: {name}"].value or 0 for name in names]
        covered.barh(names[::-1], counts[::-1], left=left[::-1], color=colour, label=result)
        left += counts
    covered.legend(fontsize=6, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    covered.set_title(f"{len(SCHEMAS)} features of JSON Schema", fontsize=9)
    most = max(int(one.name.split(", ")[1].split()[0]) for one in records if " rows" in one.name and one.peers)
    for axes, title, keys in (
        (compiled, "to compile, ms", [f"compile {case.name}" for case in SPEED]),
        (masked, f"a token's mask among {most} rows, µs", [f"a token of {case.name}, {most} rows" for case in SPEED]),
    ):
        places = np.arange(len(keys))
        for index, (name, colour) in enumerate(zip(names, ("#76b900", "#b0b0b0"), strict=False)):
            axes.barh(places - 0.4 * index, [value[key].peers[name] for key in keys], 0.4, color=colour, label=name)
        axes.set_yticks(places - 0.2, [case.name for case in SPEED], fontsize=7)
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=6)
    compiled.set_xscale("log")
    for axes in (covered, compiled, masked):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
    figure.text(0, -0.06, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
