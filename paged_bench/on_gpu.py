"""All checks and measurements that need a GPU, in one command, most valuable first.

    python -m paged_bench.on_gpu [--minutes 30] [--only checks engine ...]

PYTHONPATH must have the checkout and its folders kernels/ and client/, unless the project is installed. It needs no
network, and only the packages of the engine: a step that needs another one says so. Results go to
kernels/bench/results/<date>-<gpu>/, with versions, the clocks before and after, and a summary beside the figures of an
earlier run. A step that fails or exceeds its limit is reported, its results so far are kept, and the next one runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from paged_bench._gpu_steps import OK, ROOT, STEPS, Step, rehearsal
from paged_bench._gpu_summary import summarize
from paged_bench._report import package_versions, rate

RESULTS = ROOT / "kernels/bench/results"
EARLIER = RESULTS / "2026-11-22-nvidia-h100/figures.json"
CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu,utilization.gpu"
SKIPPED = "skipped: "


def environment() -> dict[str, str]:
    """Return the current state of the GPU, and the versions of packages."""
    query = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    shown = ""
    if shutil.which(query[0]):
        shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    found = dict(zip(CLOCKS.split(","), shown.splitlines()[0].split(", "), strict=False)) if shown else {}
    return found | package_versions() | {"python": sys.version.split()[0]}


def variables(compiled: str) -> dict[str, str]:
    """Return the environment variables of the steps.

    compiled: the folder of compiled kernels, which all steps share. It is empty at first, so that the load time of the
    first engine has all compilation in it.
    """
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PAGED_TEST_DEVICE": "cuda" if torch.cuda.is_available() else "cpu",
        "TRITON_CACHE_DIR": compiled,
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
        if not args.only or step.name in args.only
    ]
    chip = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    out = (args.out or RESULTS / f"{datetime.datetime.now():%Y-%m-%d-%H%M}-{chip}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    ended = run(steps, out, args.minutes)
    print(summarize(out, list(ended), EARLIER))
    print(f"results: {out}")
    failed = any(one != OK and not one.startswith(SKIPPED) for one in ended.values())
    return int(failed or OK not in ended.values())


if __name__ == "__main__":
    sys.exit(main())
