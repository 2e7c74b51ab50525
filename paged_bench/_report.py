"""What every benchmark shares: alternating contestants, medians and ratios, one JSON and one picture."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

NO_GPU = "no GPU"
PACKAGES = ("torch", "triton", "transformers", "numpy")


@dataclass(frozen=True)
class Record:
    """One measured figure."""

    name: str
    value: float | None  # None: not measured, and `unit` says why
    unit: str
    target: float | None = None  # what we aim at
    limit: float | None = None  # what no implementation can pass
    peers: Mapping[str, float] = field(default_factory=dict)  # the same figure of others, in the same run


def parser(name: str, description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"paged bench {name}", description=description)
    made.add_argument("--quick", action="store_true", help="under a minute on 2 cores; what is named beside it holds")
    made.add_argument("--json", type=_new_file, metavar="FILE", help="write the records here, and a picture beside it")
    return made


def arguments(made: argparse.ArgumentParser, argv: Sequence[str], quick: Mapping[str, object]) -> argparse.Namespace:
    """What `argv` says. With --quick the defaults are those of `quick`: what is named beside it holds all the same."""
    args = made.parse_args(argv)
    if args.quick:
        made.set_defaults(**quick)
        args = made.parse_args(argv)
    return args


def count(text: str) -> int:
    """An argument: how many, at least one."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def rate(text: str) -> float:
    """An argument: how many a second."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def _new_file(text: str) -> Path:
    """Refused before the work is done that is to be written there."""
    file = Path(text)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no directory {str(file.parent)!r}")
    return file


def machine() -> str:
    """The machine and the versions that a figure belongs to."""
    import torch

    if torch.cuda.is_available():
        chip = torch.cuda.get_device_name()
    else:
        chip = f"{_processor()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return f"{chip}; {platform.system()} {platform.release()}; Python {platform.python_version()}, {packages}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def alternate(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run each contestant once a round, starting one later each time; its figures by name, one a round."""
    names = list(contestants)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            print(f"round {turn + 1} of {rounds}: {name} ...", end=" ", file=sys.stderr, flush=True)
            figures[name].append(contestants[name]())
            print(f"{figures[name][-1]:.4g}", file=sys.stderr, flush=True)
    return figures


def not_measured(name: str, reason: str) -> Record:
    """What a machine lacks is said, not left out."""
    return Record(name, None, f"not measured: {reason}")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that `share` (0 to 1) of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ratio(
    name: str, ours: Sequence[float], theirs: Sequence[float], target: float | None = None, limit: float | None = None
) -> Record:
    """Of figures taken in the same rounds: the median of their ratios, with p10 and p90 as peers."""
    paired = [a / b for a, b in zip(ours, theirs, strict=True)]
    spread = {"p10": percentile(paired, 0.1), "p90": percentile(paired, 0.9)}
    return Record(name, statistics.median(paired), "x", target, limit, spread)


def added_latency(
    name: str, times: Mapping[str, Sequence[Sequence[float]]], own: str, target: float | None = None
) -> list[Record]:
    """What each contestant's median takes, and what that is more than `own`'s of the same round. times: the seconds of
    each round, by contestant."""
    if not all(one for rounds in times.values() for one in rounds):
        return [not_measured(name, "all tokens came in one response")]
    medians = {who: [1e3 * statistics.median(one) for one in rounds] for who, rounds in times.items()}
    records = [Record(f"{name} ({own})", statistics.median(medians[own]), "ms")]
    for who, values in medians.items():
        if who != own:
            more = [later - earlier for later, earlier in zip(values, medians[own], strict=True)]
            records += [
                Record(f"{name} ({who})", statistics.median(values), "ms"),
                Record(f"added to {name} ({who})", statistics.median(more), "ms", target),
            ]
    return records


def publish(records: Sequence[Record], file: Path | None, draw: Callable[[Path, str], None]) -> None:
    """Print the records, and write them to `file` with a picture of the same name beside it."""
    print(machine())
    for record in records:
        peers = "".join(f"; {name} {value:.4g}" for name, value in record.peers.items())
        value = "" if record.value is None else f"{record.value:.4g} "
        print(f"{record.name}: {value}{record.unit}{peers}")
    if file is not None:
        file.write_text(json.dumps([asdict(record) for record in records], indent=2) + "\n")
        draw(file.with_suffix(".png"), machine())
        print(f"wrote {file} and {file.with_suffix('.png')}")
