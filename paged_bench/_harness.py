"""The skeleton of every benchmark: options, alternating rounds, records in a JSON file, and the chart.

A benchmark is a public module of this package whose `main` is a `Benchmark`. It declares its options, yields records,
and says what its chart shows; `lora.py` is a short example. The rest is here: `--quick`, `--json`, the order of
rounds, medians and ratios, the description of the run, and the picture.

A report is a JSON object: `run` says what was run, where and when (`describe_run`), `complete` whether the benchmark
has ended, and `records` has the figures.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_GPU = "no GPU"
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "transformers", "numpy")
GREEN, GREY, DARK = "#76b900", "#b0b0b0", "#606060"

T = TypeVar("T")


# --- records -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One measured figure."""

    name: str
    value: float | None  # None if it was not measured; `unit` then has the reason
    unit: str
    target: float | None = None  # the value to reach
    limit: float | None = None  # the best possible value
    peers: Mapping[str, float] = field(default_factory=dict)  # the same figure of other contestants in the same run


def not_measured(name: str, reason: str, target: float | None = None) -> Record:
    """Return the record of a figure that this machine cannot measure."""
    return Record(name, None, f"not measured: {reason}", target)


def first_line(error: Exception) -> str:
    """Return the first line of an error, with its type."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that at least a `share` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the 10th and 90th percentile."""
    return {"p10": percentile(values, 0.1), "p90": percentile(values, 0.9)}


def ratio(
    name: str, ours: Sequence[float], theirs: Sequence[float], target: float | None = None, limit: float | None = None
) -> Record:
    """Return the median of the ratios of figures from the same rounds, with p10 and p90 as peers."""
    paired = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Record(name, statistics.median(paired), "x", target, limit, spread(paired))


def latencies(what: str, times: Mapping[str, Sequence[float]]) -> Iterator[Record]:
    """Yield p50 and p99 of latencies. times: seconds by the name of the figure; names without values are left out."""
    for name, values in times.items():
        for share in (0.5, 0.99) if values else ():
            yield Record(f"{name} p{100 * share:.0f} {what}", 1e3 * percentile(values, share), "ms")


def figures(records: Iterable[Record], pattern: str) -> dict[str, float]:
    """Return the values of measured records whose whole name matches a pattern, by the text of its group."""
    matched = ((re.fullmatch(pattern, record.name), record.value) for record in records)
    return {match[1]: value for match, value in matched if match and value is not None}


# --- alternating rounds --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contest(Generic[T]):
    """The results of contestants in alternating rounds, by contestant and round."""

    runs: dict[str, list[T]]
    figures: dict[str, list[float]]
    failed: dict[str, str]  # contestants that failed, and why; they are in no field above

    @cached_property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.figures.items()}

    def records(self, label: str, unit: str) -> list[Record]:
        """Return a record of each median. label: its name, in which {} is the contestant."""
        return [Record(label.format(name), value, unit) for name, value in self.medians.items()]

    def ratio(
        self, name: str, ours: str, theirs: str, target: float | None = None, limit: float | None = None
    ) -> Record:
        """Return `ratio` of two contestants."""
        return ratio(name, self.figures[ours], self.figures[theirs], target, limit)


def alternate(
    contestants: Mapping[str, Callable[[], T]],
    rounds: int,
    figure: Callable[[T], float] = float,  # type: ignore[assignment]
    *,
    label: str = "{}",
    may_fail: Collection[str] = (),
    warm_up: bool = False,
    quiet: bool = False,
    seconds: float = math.inf,
) -> Contest[T]:
    """Run each contestant once per round. Each round starts with another contestant.

    Args:
        figure: returns the figure of a run, by default the run itself.
        label: what the progress says of a contestant, in which {} is its name.
        may_fail: contestants whose error only excludes them. An error of any other contestant ends the benchmark.
        warm_up: run each contestant once before, which does not count.
        quiet: show no progress.
        seconds: no round but the first begins if it would probably end later than that.
    """
    names, began = list(contestants), time.monotonic()
    runs: dict[str, list[T]] = {name: [] for name in names}
    values: dict[str, list[float]] = {name: [] for name in names}
    failed: dict[str, str] = {}

    def show(text: str, end: str = " ") -> None:
        if not quiet:
            print(text, end=end, file=sys.stderr, flush=True)

    for number in range(-warm_up, rounds):
        elapsed = time.monotonic() - began
        if number > 0 and elapsed * (number + 1) / number > seconds:
            show(f"{number} of {rounds} rounds fit into {seconds:.0f} s", "\n")
            break
        first = max(0, number) % len(names)
        for name in names[first:] + names[:first]:
            if name in failed:
                continue
            title = f"round {number + 1} of {rounds}" if number >= 0 else "warm-up"
            show(f"{title}: {label.format(name)} ...")
            try:
                run = contestants[name]()
                value = figure(run)
            except Exception as error:
                if name not in may_fail:
                    raise
                failed[name] = first_line(error)
                del runs[name], values[name]
                show(failed[name], "\n")
                continue
            show(f"{value:.4g}", "\n")
            if number >= 0:
                runs[name].append(run)
                values[name].append(value)
    return Contest(runs, values, failed)


class TimePlan:
    """Divides the remaining time of the command between its parts, in proportion to the time of one round of each."""

    def __init__(self, minutes: float) -> None:
        """Start the time of the command."""
        self._end = time.monotonic() + 60 * minutes
        self._parts: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        """Add a part. seconds: about how long a round of it takes."""
        assert part not in self._parts, part
        self._parts[part] = seconds

    def take(self, part: str) -> float:
        """Return the seconds for a part, which comes next, and plan the others without it."""
        total, own = sum(self._parts.values()), self._parts.pop(part)
        return self.left() * (own / total if total else 1.0)

    def left(self, reserved: str | None = None) -> float:
        """Return the seconds until the command should end, without a round of a reserved part if it is planned."""
        return max(0.0, self._end - time.monotonic() - self._parts.get(reserved or "", 0.0))


# --- options -------------------------------------------------------------------------------------------------------


class InvalidArgument(ValueError):
    """An argument that cannot be used, found while the benchmark runs."""


def count(text: str) -> int:
    """Parse an integer that is at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def rate(text: str) -> float:
    """Parse a rate: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def bounded(
    parse: Callable[[str], T], least: float = -math.inf, most: float = math.inf, why: str = ""
) -> Callable[[str], T]:
    """Return a parser of numbers from `least` to `most`. why: the reason, for the error."""

    def parsed(text: str) -> T:
        value: Any = parse(text)
        if not least <= value <= most:
            limit = f"at least {least:g}" if value < least else f"at most {most:g}"
            raise ArgumentTypeError(f"{text!r}: must be {limit}{why and f', {why}'}")
        return value

    return parsed


class Option:
    """An option of a benchmark. Its help ends with the default, unless it already says what it is."""

    def __init__(self, flag: str, help: str, default: Any = None, *, many: bool = False, **settings: Any) -> None:
        """
        Args:
            default: without `type` or `choices` in `settings`, it also says what is parsed: a count, a rate or a text.
            many: whether the option may be repeated; its value, like the default, is a list.
            settings: further arguments of `add_argument`.
        """
        sample = default[0] if many and default else default
        if not {"type", "choices", "action"} & settings.keys():
            settings["type"] = {int: count, float: rate}.get(type(sample), str)
        if settings.get("type") is count or type(sample) is int:
            settings.setdefault("metavar", "N")
        elif settings.get("type") is rate or type(sample) is float:
            settings.setdefault("metavar", "X")
        if many:
            settings["action"], help = _Repeated, f"{help}; may be repeated"
        if default is not None and "(default" not in help:
            shown = ", ".join(map(str, default)) if isinstance(default, (list, tuple)) else f"{default}"
            help = f"{help} (default: {shown})"
        self.flag, self.settings = flag, {"help": help, "default": default, **settings}


class _Repeated(Action):
    """Collects the values of a repeated option, which replace its default."""

    def __call__(self, parser: object, namespace: Namespace, values: Any, option_string: object = None) -> None:
        given = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if given is self.default else given), values])


def model_option(default: str | None = "demo", help: str = "Hugging Face model directory") -> Option:
    return Option("--model", help, default)


def rounds_option(default: int) -> Option:
    return Option("--rounds", "number of rounds", default)


def minutes_option(how: str) -> Option:
    """Return the option for `TimePlan`. how: how the benchmark keeps the time."""
    return Option("--minutes", f"time of the command: {how} to keep it", 15.0)


def _new_file(text: str) -> Path:
    """Parse the path of a file to write. It is checked before the benchmark runs."""
    file = Path(text)
    if not file.parent.is_dir():
        raise ArgumentTypeError(f"{text!r}: there is no directory {str(file.parent)!r}")
    return file


# --- charts --------------------------------------------------------------------------------------------------------


LONG_LABEL = 40  # characters


@dataclass(frozen=True)
class Bars:
    """A part of a chart with a horizontal bar for each value, the first at the top."""

    title: str
    values: Mapping[str, float]
    grey: Collection[str] = ()  # bars of other contestants
    line: float | None = None  # value of a target
    labels: Sequence[str] = ()  # texts of the bars; by default their values

    @property
    def height(self) -> float:
        """Inches."""
        return 0.8 + 0.32 * len(self.values)

    @property
    def is_wide(self) -> bool:
        """Whether its labels are too long for another panel beside it."""
        return max(map(len, self.values), default=0) > LONG_LABEL

    def draw(self, axes: Axes) -> None:
        colors = [GREY if name in self.grey else GREEN for name in self.values]
        drawn = axes.barh(list(self.values), list(self.values.values()), color=colors, height=0.7)
        labels = self.labels or [number(value) for value in self.values.values()]
        background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # in front of lines
        axes.bar_label(drawn, labels, padding=4, fontsize=8, bbox=background)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        if self.line is not None:
            axes.axvline(self.line, color=DARK, linewidth=0.8)
        if min(self.values.values(), default=0.0) < 0:
            axes.tick_params(axis="y", pad=36)  # room for the labels of negative bars
            axes.axvline(0, color="black", linewidth=0.8)


@dataclass(frozen=True)
class Lines:
    """A part of a chart with lines over a logarithmic axis."""

    title: str
    lines: Mapping[str, Mapping[float, float]]
    below: str  # label of the axis
    dotted: Collection[str] = ()
    height = 3.4  # inches
    is_wide = False

    def draw(self, axes: Axes) -> None:
        ticks = sorted({x for line in self.lines.values() for x in line})
        for name, line in self.lines.items():
            style = {"linestyle": ":", "color": DARK} if name in self.dotted else {"marker": "o", "markersize": 4}
            axes.plot(list(line), list(line.values()), label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xlabel(self.below, fontsize=8)
        axes.set_ylim(0)
        axes.legend(frameon=False, fontsize=8)


Panel: TypeAlias = "Bars | Lines"


def number(value: float) -> str:
    """Return a figure with three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def draw(panels: Sequence[Panel], file: Path, caption: str) -> None:
    """Draw panels side by side, or one below the other if their labels are long, with a caption below."""
    from matplotlib.figure import Figure

    panels = panels or [Bars("nothing was measured", {})]
    heights = [panel.height for panel in panels]
    if any(panel.is_wide for panel in panels):
        figure = Figure(figsize=(9.0, sum(heights)), layout="constrained")
        plots = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    else:
        figure = Figure(figsize=(max(6.0, 4.2 * len(panels)), max(heights)), layout="constrained")
        plots = figure.subplots(1, len(panels), squeeze=False)
    for axes, panel in zip(plots.flat, panels, strict=True):
        panel.draw(axes)
        axes.set_title(panel.title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.text(0, 0, caption, fontsize=6, color=DARK, verticalalignment="top")
    figure.savefig(file, dpi=150, bbox_inches="tight")


# --- the run -------------------------------------------------------------------------------------------------------


def package_versions() -> dict[str, str]:
    """Return the versions of PACKAGES, as their modules give them: a package may have another name, as
    pytorch-triton."""
    return {name: import_module(name).__version__ for name in PACKAGES}


def describe_run(command: str, level: str | None = None) -> dict[str, object]:
    """Return what a report says of its run: command, date, commit, processor or GPU, threads and versions.

    level: the instruction set, if it is not the one that the kernels choose.
    """
    import torch

    from paged_backend.execution.cpu_threads import count_threads  # imports torch, which takes seconds
    from paged_backend.utils.machine import cpu_name, usable_cores
    from paged_kernels.cpu import native
    from paged_kernels.cpu.build import supported

    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "processor": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        # the instruction set of the C++ kernels
        "instructions": level or os.environ.get(native.LEVEL) or next(iter(supported()), None),
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
    """Return the line of a picture that says what was run, where and when."""
    # Figures that are calculated have no threads.
    threads = f", {run['threads']} threads on {run['cores']} cores" if run["threads"] else ""
    chip = run["gpu"] or f"{run['processor']}{threads}"
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    command = run["command"].partition(" --json ")[0]
    when = f"{run['date'][:10]}, commit {run['commit']}"
    parts = (chip, when, run.get("system"), versions)  # records of older versions have no system
    return f"{command}\n{'; '.join(filter(None, parts))}"


class Records(list[Record]):
    """The figures of a run. Each figure is saved when it is added, so a benchmark that ends early keeps its figures."""

    def __init__(self, command: str, file: Path | None, level: str | None = None) -> None:
        """file: the report, or None. level: an argument of `describe_run`."""
        super().__init__()
        self.file = file
        self.run = describe_run(command, level)

    def append(self, record: Record) -> None:
        """Add a figure, and save all."""
        super().append(record)
        self.save(complete=False)

    def extend(self, records: Iterable[Record]) -> None:
        """Add figures as they are measured."""
        for record in records:
            self.append(record)

    def save(self, *, complete: bool) -> None:
        """Write the report, if there is a file for it."""
        if self.file is not None:
            report = {"run": self.run, "complete": complete, "records": [asdict(record) for record in self]}
            partial = self.file.with_name(f".{self.file.name}.partial")
            partial.write_text(json.dumps(report, indent=2) + "\n")
            partial.replace(self.file)

    def print(self) -> None:
        """Print the run and all figures."""
        print(caption(self.run))
        for record in self:
            peers = "".join(f"; {name} {value:.4g}" for name, value in record.peers.items())
            value = "" if record.value is None else f"{record.value:.4g} "
            print(f"{record.name}: {value}{record.unit}{peers}")


@dataclass(frozen=True)
class Benchmark:
    """What `paged bench NAME` runs. NAME is the module of `measure`."""

    documentation: str | None  # docstring of the module; its first line is the help
    measure: Callable[[Namespace], Iterable[Record]]
    panels: Callable[[Sequence[Record]], Iterable[Panel]]  # parts of the chart, drawn from the records alone
    options: Sequence[Option] = ()
    quick: Mapping[str, object] = field(default_factory=dict)  # values of options with --quick, instead of the defaults

    @property
    def name(self) -> str:
        return self.measure.__module__.rpartition(".")[2]

    def parser(self) -> ArgumentParser:
        """Return the parser of the command line."""
        description = (self.documentation or "").partition("\n")[0]
        made = ArgumentParser(prog=f"paged bench {self.name}", description=description)
        made.add_argument(
            "--quick",
            action="store_true",
            help="run a short version, of one to a few minutes on 2 cores; explicit options still apply",
        )
        made.add_argument(
            "--json", type=_new_file, metavar="FILE", help="write the records to FILE and draw a picture next to it"
        )
        for option in self.options:
            made.add_argument(option.flag, **option.settings)
        return made

    def arguments(self, argv: Sequence[str]) -> Namespace:
        """Parse the command line."""
        parser = self.parser()
        args = parser.parse_args(argv)
        if args.quick:
            parser.set_defaults(**self.quick)
            args = parser.parse_args(argv)
        return args

    def __call__(self, argv: Sequence[str]) -> int:
        """Run with command line arguments: measure, print the records, write the report and draw the chart.

        Returns the exit status. After Ctrl-C or SIGTERM, it does so with the records until then, which the report marks
        as not complete.
        """
        args = self.arguments(argv)
        records = Records(shlex.join(["paged", "bench", self.name, *argv]), args.json, getattr(args, "level", None))
        interrupt: int | None = None
        try:
            with _signals_as_exceptions():
                records.extend(self.measure(args))
        except InvalidArgument as error:
            self.parser().error(str(error))
        except KeyboardInterrupt as error:
            interrupt = error.args[0] if error.args else signal.SIGINT
            print("interrupted: the records until here follow", file=sys.stderr, flush=True)
        records.print()
        records.save(complete=interrupt is None)
        self._draw(records)
        return 0 if interrupt is None else 128 + interrupt

    def _draw(self, records: Records) -> None:
        if records.file is None:
            return
        if find_spec("matplotlib") is None:
            print(f"wrote {records.file}, and no picture: matplotlib is not installed")
            return
        picture = records.file.with_suffix(".png")
        draw(list(self.panels(records)), picture, caption(records.run))
        print(f"wrote {records.file} and {picture}")


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt with their number; only in the main thread."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
