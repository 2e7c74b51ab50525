"""Libraries for structured outputs against each other: what they can hold an output to, how long a mask takes, how long
they take to start and to compile, and what they do with what is meant to hurt.

Ours is llguidance, with the limits that the engine gives it. Times are those of the processor; a feature is held to
where texts that fit can be drawn and the others cannot.
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

from client.serving.repository import resolve_model
from paged_bench._guided_cases import EXPRESSIONS, GRAMMARS, HARD, SCHEMAS, SPEED, Case
from paged_bench._report import Record, alternate, arguments, count, not_measured, parser, publish, ratio

OURS, PEER = "llguidance", "xgrammar"
MOST_BYTES = 6 << 30  # of a process that tries a hard case
HELD, REFUSED, IGNORED, STRICT = "held to", "refused", "ignored", "too strict"


class Llguidance:
    """As the engine uses it."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        from paged_backend.guided.tokenizer import llguidance_tokenizer

        self._tokenizer = llguidance_tokenizer(tokenizer, vocab_size, [tokenizer.eos_token_id])

    def compile(self, case: Case) -> Callable[[], Any]:
        """What makes a matcher. Raises whatever the library says."""
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
    """As it is meant to be used, with objects that may have other properties, as JSON Schema has it."""

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


def outcome(library: Any, tokenizer: Any, words: int, case: Case) -> str:
    try:
        made = library.compile(case)
    except Exception:
        return REFUSED
    if not all(fits(library, made(), tokenizer, words, text) for text in case.good):
        return STRICT
    return IGNORED if any(fits(library, made(), tokenizer, words, text) for text in case.bad) or not case.bad else HELD


def fits(library: Any, matcher: Any, tokenizer: Any, words: int, text: str) -> bool:
    """Whether a whole output may be this text."""
    row = np.zeros(words, dtype=np.int32)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not library.accept(matcher, token):
            return False
    library.fill(matcher, row)
    end = tokenizer.eos_token_id
    return bool(row.view(np.uint32)[end // 32] >> np.uint32(end % 32) & 1)


def masks(library: Any, tokenizer: Any, words: int, case: Case, batch: int) -> Callable[[], float]:
    """Microseconds of a row in a step: its mask, and its token afterwards. Each row is at another place of the text."""
    tokens = tokenizer.encode(case.good[0], add_special_tokens=False)
    made, rows = library.compile(case), np.zeros((batch, words), dtype=np.int32)

    def once() -> float:
        matchers = []
        for row in range(batch):
            matchers.append(made())
            for token in tokens[: row % len(tokens)]:
                library.accept(matchers[-1], token)
        seconds, drawn = 0.0, 0
        for step in range(len(tokens)):
            started = time.process_time()
            for row, matcher in enumerate(matchers):
                place = row % len(tokens) + step
                if place < len(tokens):
                    library.fill(matcher, rows[row])
                    library.accept(matcher, tokens[place])
                    drawn += 1
            seconds += time.process_time() - started
        return seconds / drawn * 1e6

    once()
    return once


def compiling(library: Any, case: Case) -> Callable[[], float]:
    """Milliseconds until the first mask can be had."""

    def once() -> float:
        started = time.process_time()
        library.compile(case)()
        return (time.process_time() - started) * 1e3

    return once


def hard(name: str, model: str, vocab_size: int, case: Case, seconds: int) -> tuple[float, str, float]:
    """In a process of its own: the processor's seconds to compile a case and write its text, what came of it, and the
    megabytes that it took."""
    command = [sys.executable, "-c", f"from {__name__} import try_one; try_one()"]
    asked = json.dumps([name, model, vocab_size, list(case), seconds])
    done = subprocess.run(command, input=asked, capture_output=True, text=True)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return seconds, f"more than {seconds} s", 0.0
    if done.returncode:
        return 0.0, f"ended the process ({done.returncode})", 0.0
    took, what, megabytes = json.loads(done.stdout.splitlines()[-1])
    return took, what, megabytes


def try_one() -> None:
    """In the process of `hard`."""
    name, model, vocab_size, fields, seconds = json.loads(sys.stdin.read())
    case, tokenizer = Case(*fields), AutoTokenizer.from_pretrained(model)
    library = LIBRARIES[name](tokenizer, vocab_size)
    before, most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, int(time.process_time()) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    started, what = time.process_time(), "compiled"
    try:
        _write(library, library.compile(case)(), tokenizer, vocab_size, case)
    except Exception:
        what = REFUSED
    took = time.process_time() - started
    print(json.dumps([took, what, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024]), flush=True)


def _write(library: Any, matcher: Any, tokenizer: Any, vocab_size: int, case: Case) -> None:
    row = np.zeros(vocab_size // 32, dtype=np.int32)
    library.fill(matcher, row)
    for token in tokenizer.encode(case.good[0], add_special_tokens=False) if case.good else ():
        library.accept(matcher, token)
        library.fill(matcher, row)


def _started(name: str, tokenizer: Any, vocab_size: int) -> tuple[Any, float]:
    started = time.perf_counter()
    library = LIBRARIES[name](tokenizer, vocab_size)
    return library, time.perf_counter() - started


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"rounds": 2, "batches": [1, 16], "hard": 0})
    model = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    vocab_size = -(-len(tokenizer) // 32) * 32
    libraries, records = {}, []
    for name in LIBRARIES:
        try:
            libraries[name], seconds = _started(name, tokenizer, vocab_size)
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
            took, what, megabytes = hard(name, model, vocab_size, case, args.seconds)
            print(f"{took:.4g} s, {what}", file=sys.stderr, flush=True)
            records.append(Record(f"{case.name}: {name}", took, f"s, {what}", peers={"MB": megabytes}))
    publish(records, args.json, lambda file, caption: draw(records, file, caption))
    return 0


def _coverage(what: str, cases: Sequence[Case], libraries: dict[str, Any], tokenizer: Any, words: int) -> list[Record]:
    records = []
    for name, library in libraries.items():
        found: dict[str, list[str]] = {HELD: [], REFUSED: [], IGNORED: [], STRICT: []}
        for case in cases:
            found[outcome(library, tokenizer, words, case)].append(case.name)
        for result, names in found.items():
            told = f" ({', '.join(names)})" if names and result is not HELD else ""
            records.append(Record(f"{what} {result}: {name}", len(names), f"of {len(cases)}{told}"))
    return records


def _compare(what: str, unit: str, rounds: int, contestants: dict[str, Callable[[], float]]) -> list[Record]:
    figures = alternate(contestants, rounds)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    records = [Record(what, medians[OURS], unit, peers=medians)]
    return [*records, ratio(f"{what}: {PEER} takes", figures[PEER], figures[OURS])] if PEER in figures else records


def _parser() -> ArgumentParser:
    made = parser("guided", __doc__)
    made.add_argument("--model", default="demo", help="a Hugging Face directory whose tokenizer is used, or 'demo'")
    made.add_argument("--batches", type=count, nargs="+", default=[1, 16, 64], metavar="N", help="rows of a step")
    made.add_argument("--rounds", type=count, default=5, metavar="N")
    made.add_argument("--hard", type=int, default=len(HARD), metavar="N", help="how many hard cases; with --quick none")
    made.add_argument("--seconds", type=count, default=10, metavar="N", help="that a hard case may take")
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
