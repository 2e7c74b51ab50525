"""All checks and measurements that need a GPU, in one command, most valuable first.

    python -m paged_bench.on_gpu [--minutes 30] [--group checks engine] [--only model ...]

The groups "checks" and "engine" take up to ten minutes together. Kernels that are off, because they have never run on a
GPU, have steps of their own, whatever PAGED_GPU_FEATURES is. PYTHONPATH must have the checkout and its folders kernels/
and client/, unless the project is installed. It needs no network, and only the packages of the engine: a step that
needs another one says so. Results go to kernels/bench/results/<date>-<gpu>/, with versions, the clocks before and
after, and a summary beside the figures of an earlier run. A step that fails or exceeds its limit is reported, its
results so far are kept, and the next one runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from paged_bench._engine import MODELS, TABLE
from paged_bench._harness import ROOT, number, package_versions, rate
from paged_client.serving import demo_model
from paged_client.serving.server_files import ServerNotFoundError, find_server
from paged_kernels.launch import DEPENDENT_LAUNCHES, FEATURES, PRODUCERS

RESULTS = ROOT / "kernels/bench/results"
EARLIER = RESULTS / "2026-11-22-nvidia-h100/figures.json"
CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu,utilization.gpu"
SKIPPED = "skipped: "
MARK = "PAGED_BENCH_STEP"  # an environment variable of all processes of a step
GPU, DEMO_MODEL, SERVER = "a GPU", "the demo model", "tritonserver"
OK = "ok"
# Figures to show even if the earlier run does not have them.
SHOWN = re.compile(r"output_throughput |load to ready|KV cache |kernels compiled |.*\((vLLM|FlashInfer)\)$")


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One command of the run."""

    name: str
    limit: float  # seconds
    command: tuple[str, ...]  # arguments of the Python interpreter; {out} is the folder of the results
    needs: tuple[str, ...] = ()  # packages, GPU, DEMO_MODEL or SERVER
    group: str = "more"
    features: str = ""  # of PAGED_GPU_FEATURES: kernels that are off because they have never run on a GPU

    def missing(self) -> str | None:
        """Return the reason why the step cannot run on this machine."""
        return next((reason for reason in map(_missing, self.needs) if reason), None)

    def run(self, out: Path, seconds: float, variables: Mapping[str, str]) -> str:
        """Run the command, with its output in a log. Returns OK or what went wrong.

        After `seconds` all its processes are killed. The files that it has written until then stay.
        """
        mark = secrets.token_hex(16)
        command = [sys.executable, *(part.format(out=out) for part in self.command)]
        environment = os.environ | dict(variables) | {MARK: mark, FEATURES: self.features}
        with (out / f"{self.name}.log").open("w") as log:
            try:
                done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=seconds)
            except subprocess.TimeoutExpired:
                return f"stopped after {seconds:.0f} s"
            finally:
                _kill_marked(mark)
        return OK if done.returncode == 0 else f"failed with {done.returncode}"


def _missing(name: str) -> str | None:
    if name == GPU:
        return None if torch.cuda.is_available() else "no GPU"
    if name == DEMO_MODEL:
        there = demo_model.default_directory().is_dir()
        return None if there else "the demo model is not prepared (make demo-model)"
    if name == SERVER:
        try:
            find_server()
        except ServerNotFoundError:
            return "tritonserver is not installed"
        return None
    return None if find_spec(name) else f"{name} is not installed"


def _kill_marked(mark: str) -> None:
    """Kill the processes that have `mark` in their environment, whatever their parent, group or session is now."""
    for _ in range(100):
        pids = list(_marked(mark))
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.1)  # a process takes a while to end, and may have started another one before it was killed


def _marked(mark: str) -> Iterator[int]:
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if f"{MARK}={mark}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                yield int(directory.name)


def _bench(step: str, limit: float, name: str, *arguments: str, **options: Any) -> Step:
    """Return a step that runs `paged bench NAME`, without the packages that the other commands of `paged` import."""
    run = f"import sys; from paged_bench.{name} import main; sys.exit(main(sys.argv[1:]))"
    return Step(step, limit, ("-c", run, "--json", f"{{out}}/{step}.json", *arguments), **options)


def _module(step: str, limit: float, name: str, *arguments: str, **options: Any) -> Step:
    """Return a step that runs a module of this package."""
    return Step(step, limit, ("-m", f"paged_bench.{name}", *arguments, "--json", f"{{out}}/{step}.json"), **options)


def _pytest(step: str, limit: float, *arguments: str) -> Step:
    """Return a step that runs tests, with a process per core if pytest-xdist is installed: most of it is compiling."""
    cores = len(os.sched_getaffinity(0))
    parallel = ("-n", str(cores), "--dist=load", "--maxschedchunk=1") if find_spec("xdist") else ()
    return Step(step, limit, ("-m", "pytest", "-q", *parallel, *arguments), ("pytest",))


def _workloads(*names: str) -> tuple[str, ...]:
    return tuple(part for name in names for part in ("--workload", name))


def _with_features(group: str, make: Callable[..., Step]) -> Iterator[Step]:
    """Yield a step of a group with each feature that has not run on a GPU: one that hangs does not stop the others."""
    for feature in (DEPENDENT_LAUNCHES, PRODUCERS):
        yield make(f"{group}-{feature}", group=group, features=feature)


ENGINE_TESTS = (
    "integration/test_equivalence", "engine/test_core", "engine/test_prefix_stores", "scheduling/test_speculation",
    "scheduling/test_beam_search", "kv/test_page_copier", "kv/test_cache", "kv/stores/test_disk",
    "engine/test_workers",
)  # fmt: skip
QWEN = ("--model", "Qwen3-0.6B")
ALONE = (*QWEN, "--alone", "--rounds")
SHORT = _workloads(TABLE[0], TABLE[1], TABLE[3])
STEPS = (
    _module("checks", 100, "_kernel_checks", "--processes", "8", group="checks"),
    *_with_features("checks", lambda name, **on: _module(name, 50, "_kernel_checks", "--processes", "8", **on)),
    _module("model", 100, "_model_check", needs=(DEMO_MODEL, "tritonclient"), group="checks"),
    _bench("engine", 160, "engine", *ALONE, "2", *_workloads("nano"), *SHORT, group="engine"),
    *_with_features("engine", lambda name, **on: _bench(name, 70, "engine", *ALONE, "2", *SHORT, **on)),
    _bench("kernels-quick", 150, "kernels", "--quick", group="kernels"),
    *_with_features("kernels", lambda name, **on: _bench(name, 100, "kernels", "--quick", **on)),
    _bench("kernels", 400, "kernels", group="kernels"),
    Step("tune", 150, ("-m", "paged_kernels.tune", "--model", str(MODELS / QWEN[1])), group="kernels"),
    _bench("engine-table", 420, "engine", *ALONE, "2", *_workloads(*TABLE)),
    _bench(
        "vllm", 300, "engine", *QWEN, "--rounds", "2", "--peers", "vllm", *_workloads("nano", *TABLE[:3], TABLE[4]),
        needs=("vllm",),
    ),
    _pytest(
        "kernel-tests", 300, "tests/kernels", "--ignore=tests/kernels/cpu", "--deselect", "tests/kernels/test_aot.py"
    ),
    _pytest("engine-tests", 300, *(f"tests/{name}.py" for name in ENGINE_TESTS)),
    _bench("llama", 240, "engine", "--model", "Llama-3.1-8B", "--rounds", "2", "--alone", *_workloads("sharegpt")),
    _bench("speculation", 90, "speculation", "--dtype", "bfloat16", needs=(DEMO_MODEL,)),
    _bench("server", 240, "server", needs=("tritonclient", SERVER, DEMO_MODEL)),
    _bench("transformers", 300, "engine", *QWEN, "--rounds", "1", "--peers", "transformers", *_workloads("nano")),
)  # fmt: skip
GROUPS = tuple(dict.fromkeys(step.group for step in STEPS))


def rehearsal(model: str) -> tuple[Step, ...]:
    """Return STEPS for a machine without a GPU, to test the run: the first steps with a small model and few inputs."""
    small = ("--model", model, "--alone", "--quick", "--requests", "2", *_workloads("mixed", "2x8/4"))
    long = 3600.0  # the machine may be slow
    instead = {
        "checks": replace(STEPS[0], limit=long),
        "engine": _bench("engine", long, "engine", *small, group="engine"),
        "kernels-quick": _bench("kernels-quick", long, "kernels", "--quick", "--only", "decode", group="kernels"),
    }
    return tuple(instead.get(step.name) or replace(step, needs=(*step.needs, GPU)) for step in STEPS)


# --- summary ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A figure of two runs. The earlier run may have several values: of rounds, or the lowest and the highest."""

    unit: str
    earlier: Sequence[float] = ()
    now: float | None = None

    @property
    def cells(self) -> tuple[str, str, str]:
        """The earlier value, the current one and the unit, as they are shown."""
        low, high = (min(self.earlier), max(self.earlier)) if self.earlier else (None, None)
        earlier = _shown(low) if low == high else f"{_shown(low)} to {_shown(high)}"
        return earlier, _shown(self.now), self.unit


def _shown(value: float | None) -> str:
    return "-" if value is None else number(value)


def measured(out: Path, steps: Sequence[str]) -> dict[str, tuple[float, str]]:
    """Return value and unit of each figure in the files of the steps; a step that was stopped may have some of them.

    Figures of other contestants have their name in brackets. If several steps have a figure, the later ones have the
    name of the step in brackets.
    """
    figures: dict[str, tuple[float, str]] = {}
    for step in steps:
        file = out / f"{step}.json"
        mine: dict[str, tuple[float, str]] = {}
        for record in json.loads(file.read_text())["records"] if file.exists() else []:
            if record["value"] is not None:
                mine[record["name"]] = (record["value"], record["unit"])
            mine |= {f"{record['name']} ({who})": (value, record["unit"]) for who, value in record["peers"].items()}
        figures |= {f"{name} [{step}]" if name in figures else name: value for name, value in mine.items()}
    return figures


def compare(earlier: Mapping[str, Any], now: Mapping[str, tuple[float, str]]) -> dict[str, Figure]:
    """Return the figures of both runs by name, the earlier run's first. Figures of different units are different.

    earlier: `figures` in the file of the earlier run.
    """
    figures = {name: Figure(figure["unit"], figure["values"]) for name, figure in earlier.items()}
    for name, (value, unit) in now.items():
        if name in figures and figures[name].unit != unit:
            name = f"{name} [{unit}]"
        figures[name] = replace(figures.get(name, Figure(unit)), now=value)
    return figures


def table(figures: Mapping[str, Figure]) -> str:
    """Return the figures that the earlier run has, and figures that match SHOWN, as a table."""
    rows = [("", "earlier", "now", "")]
    rows += [(name, *figure.cells) for name, figure in figures.items() if figure.earlier or SHOWN.match(name)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:{widths[0]}}  {before:>{widths[1]}}  {now:>{widths[2]}}  {unit}".rstrip()
        for name, before, now, unit in rows
    )


def summarize(out: Path, steps: Sequence[str], earlier: Path) -> str:
    """Write the figures of both runs to summary.json in `out`, and return the table.

    earlier: the file with the figures of the earlier run.
    """
    before = json.loads(earlier.read_text())
    figures = compare(before["figures"], measured(out, steps))
    rows = {
        name: {"unit": figure.unit, "earlier": list(figure.earlier), "now": figure.now}
        for name, figure in figures.items()
    }
    about = {key: before[key] for key in ("commit", "gpu")}
    (out / "summary.json").write_text(json.dumps({"earlier": about, "figures": rows}, indent=2) + "\n")
    return f"earlier: {about['gpu']}, {about['commit']}\n{table(figures)}"


# --- the run ----------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Return the current state of the GPU, and the versions of packages."""
    query = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    shown = ""
    if shutil.which(query[0]):
        shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    clocks = dict(zip(CLOCKS.split(","), shown.splitlines()[0].split(", "), strict=False)) if shown else {}
    return clocks | package_versions() | {"python": sys.version.split()[0]}


def variables(compiled: str) -> dict[str, str]:
    """Return the environment variables of the steps.

    compiled: the folder of compiled kernels, which all steps share, unless TRITON_CACHE_DIR is set. It is empty at
    first, so the load time of the first engine includes all compilation.
    """
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PAGED_TEST_DEVICE": "cuda" if torch.cuda.is_available() else "cpu",
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or compiled,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def run(steps: Sequence[Step], out: Path, minutes: float) -> dict[str, str]:
    """Run steps until `minutes` are over, and return how each has ended. The report is written after every step."""
    started, deadline = datetime.datetime.now(), time.monotonic() + 60 * minutes
    before, ended, seconds = environment(), dict[str, str](), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="paged-bench-") as compiled:
        for step in steps:
            began = time.monotonic()
            ended[step.name] = _run(step, out, deadline - began, variables(compiled))
            seconds[step.name] = round(time.monotonic() - began, 1)
            print(f"{step.name}: {ended[step.name]}, {seconds[step.name]:.0f} s", flush=True)
            report = {"started": started.isoformat(), "before": before, "after": environment()}
            report |= {"steps": ended, "seconds": seconds}
            (out / "run.json").write_text(json.dumps(report, indent=2) + "\n")
            summarize(out, list(ended), EARLIER)
    return ended


def _run(step: Step, out: Path, left: float, variables: Mapping[str, str]) -> str:
    if reason := step.missing():
        return SKIPPED + reason
    if left < 5:
        return SKIPPED + "no time left"
    limit = min(step.limit, left)
    print(f"{step.name}: up to {limit:.0f} s ...", flush=True)
    return step.run(out, limit, variables)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=rate, default=30, help="total time (default: 30)")
    parser.add_argument("--group", nargs="+", choices=GROUPS, help="run the steps of these groups only")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="run these steps only")
    parser.add_argument("--out", type=Path, help="folder of the results; default: a new one")
    parser.add_argument(
        "--rehearse", metavar="MODEL", help=argparse.SUPPRESS
    )  # on a CPU, with a small model: for tests
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() and not args.rehearse:
        print("no GPU: nothing to measure", file=sys.stderr)
        return 2
    steps = [
        step
        for step in (rehearsal(args.rehearse) if args.rehearse else STEPS)
        if (not args.only or step.name in args.only) and (not args.group or step.group in args.group)
    ]
    chip = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    out = (args.out or RESULTS / f"{datetime.datetime.now():%Y-%m-%d-%H%M}-{chip}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    ended = run(steps, out, args.minutes)
    print(summarize(out, list(ended), EARLIER))
    print(f"results: {out}")
    failed = any(result != OK and not result.startswith(SKIPPED) for result in ended.values())
    return int(failed or OK not in ended.values())


if __name__ == "__main__":
    sys.exit(main())
