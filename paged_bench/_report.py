"""The parts that all benchmarks share: arguments, alternating runs, medians and ratios, and the JSON report.

A report is a JSON object: `run` says what was run, where and when (`describe_run`), `complete` whether the benchmark
has ended, and `records` has the figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NO_GPU = "no GPU"
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "transformers", "numpy")


@dataclass(frozen=True)
class Record:
    """One measured figure."""

    name: str
    value: float | None  # None if it was not measured; `unit` then has the reason
    unit: str
    target: float | None = None  # the value to reach
    limit: float | None = None  # the best possible value
    peers: Mapping[str, float] = field(default_factory=dict)  # the same figure of other contestants in the same run


def parser(name: str, documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark. Its description is the first line of `documentation`."""
    description = (documentation or "").partition("\n")[0]
    made = argparse.ArgumentParser(prog=f"paged bench {name}", description=description)
    made.add_argument(
        "--quick",
        action="store_true",
        help="run a short version, of one to a few minutes on 2 cores; explicit options still apply",
    )
    made.add_argument(
        "--json", type=_new_file, metavar="FILE", help="write the records to FILE and draw a picture next to it"
    )
    return made


def arguments(made: argparse.ArgumentParser, argv: Sequence[str], quick: Mapping[str, object]) -> argparse.Namespace:
    """Parse `argv`. With --quick, `quick` replaces the defaults, but not the options that are given.

    `command` of the result is the command line, for `Records`.
    """
    args = made.parse_args(argv)
    if args.quick:
        made.set_defaults(**quick)
        args = made.parse_args(argv)
    args.command = shlex.join([*made.prog.split(), *argv])
    return args


def count(text: str) -> int:
    """Parse an integer that is at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def rate(text: str) -> float:
    """Parse a rate: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def _new_file(text: str) -> Path:
    """Parse the path of a file to write. It is checked before the benchmark runs."""
    file = Path(text)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no directory {str(file.parent)!r}")
    return file


def package_versions() -> dict[str, str]:
    """Return the versions of PACKAGES, of the modules: a package may have another name, as pytorch-triton."""
    return {name: import_module(name).__version__ for name in PACKAGES}


def describe_run(command: str) -> dict[str, object]:
    """Return what a report says of its run: command, date, commit, processor or GPU, threads and versions."""
    import torch

    from paged_backend.execution.cpu_threads import count_threads  # imports torch, which takes seconds
    from paged_backend.utils.machine import cpu_name, usable_cores
    from paged_kernels.cpu.build import supported

    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "processor": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "instructions": next(iter(supported()), None),  # of the C++ kernels
        "cores": usable_cores(),
        "threads": count_threads(),
        "load": os.getloadavg()[0],  # processes that ran in the minute before
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), **package_versions()},
    }


def _commit() -> str | None:
    """Return the commit of this checkout, with "+" if files differ from it; None outside of a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=8", "HEAD") + ("+" if git("status", "--porcelain", "--untracked=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def caption(run: Mapping[str, Any]) -> str:
    """Return the line of a picture that says where and when its figures were measured."""
    chip = run["gpu"] or f"{run['processor']}, {run['threads']} threads on {run['cores']} cores"
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return f"{chip}; {run['date'][:10]}, commit {run['commit']}; {run['system']}; {versions}"


def alternate(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run each contestant once per round and return its figures by name. Each round starts with another contestant."""
    names = list(contestants)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            print(f"round {number + 1} of {rounds}: {name} ...", end=" ", file=sys.stderr, flush=True)
            figures[name].append(contestants[name]())
            print(f"{figures[name][-1]:.4g}", file=sys.stderr, flush=True)
    return figures


def not_measured(name: str, reason: str) -> Record:
    """Return the record of a figure that this machine cannot measure."""
    return Record(name, None, f"not measured: {reason}")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that at least a `share` (0 to 1) of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ratio(
    name: str, ours: Sequence[float], theirs: Sequence[float], target: float | None = None, limit: float | None = None
) -> Record:
    """Return the median of the ratios of figures from the same rounds, with p10 and p90 as peers."""
    paired = [a / b for a, b in zip(ours, theirs, strict=True)]
    spread = {"p10": percentile(paired, 0.1), "p90": percentile(paired, 0.9)}
    return Record(name, statistics.median(paired), "x", target, limit, spread)


def added_latency(
    name: str, times: Mapping[str, Sequence[Sequence[float]]], baseline: str, target: float | None = None
) -> list[Record]:
    """Return the median latency of each contestant, and how much more it is than the `baseline` of the same round.

    Args:
        times: latencies in seconds, by contestant, for each round.
    """
    if not all(one for rounds in times.values() for one in rounds):
        return [not_measured(name, "all tokens were in one response")]
    medians = {contestant: [1e3 * statistics.median(one) for one in rounds] for contestant, rounds in times.items()}
    records = [Record(f"{name} ({baseline})", statistics.median(medians[baseline]), "ms")]
    for contestant, values in medians.items():
        if contestant != baseline:
            differences = [value - base for value, base in zip(values, medians[baseline], strict=True)]
            records += [
                Record(f"{name} ({contestant})", statistics.median(values), "ms"),
                Record(f"added to {name} ({contestant})", statistics.median(differences), "ms", target),
            ]
    return records


class Records(list[Record]):
    """The figures of a run. Each one is saved when it is added, so that a benchmark that is ended early keeps them."""

    def __init__(self, args: argparse.Namespace, records: Iterable[Record] = ()):
        """args: of `arguments`."""
        super().__init__()
        self.file: Path | None = args.json
        self.run = describe_run(args.command)
        self.extend(records)

    def append(self, record: Record) -> None:
        """Add a figure, and save all."""
        super().append(record)
        self.save(complete=False)

    def extend(self, records: Iterable[Record]) -> None:
        """Add figures as they are measured."""
        for record in records:
            self.append(record)

    def __iadd__(self, records: Iterable[Record]) -> Records:  # type: ignore[override, misc]
        self.extend(records)
        return self

    def save(self, *, complete: bool) -> None:
        """Write the report, if there is a file for it."""
        if self.file is not None:
            report = {"run": self.run, "complete": complete, "records": [asdict(record) for record in self]}
            partial = self.file.with_name(f".{self.file.name}.partial")
            partial.write_text(json.dumps(report, indent=2) + "\n")
            partial.replace(self.file)


def publish(records: Records, draw: Callable[[Path, str], None]) -> None:
    """Print the records, save them, and draw a picture with the same name if matplotlib is installed.

    Args:
        draw: draws a picture into a file, with the description of the run as its caption.
    """
    print(caption(records.run))
    for record in records:
        peers = "".join(f"; {name} {value:.4g}" for name, value in record.peers.items())
        value = "" if record.value is None else f"{record.value:.4g} "
        print(f"{record.name}: {value}{record.unit}{peers}")
    records.save(complete=True)
    file = records.file
    if file is not None and find_spec("matplotlib") is None:
        print(f"wrote {file}, and no picture: matplotlib is not installed")
    elif file is not None:
        draw(file.with_suffix(".png"), caption(records.run))
        print(f"wrote {file} and {file.with_suffix('.png')}")
