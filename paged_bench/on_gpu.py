"""All checks and measurements that need a GPU, in one command: checks first, then timings.

    python -m paged_bench.on_gpu [--minutes 30] [--only checks kernels ...]

The project must be installed, or PYTHONPATH must have the checkout and its folders kernels/ and client/. Results go to
kernels/bench/results/<date>-<gpu>/, with versions and the clocks before and after. A step that fails or exceeds its
time is reported, and the next one runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "kernels/bench/results"
CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu,utilization.gpu"
PAGED = "import sys; from paged_client.cli import main; sys.exit(main(sys.argv[1:]))"
PACKAGES = ("torch", "triton", "transformers", "numpy")


@dataclass(frozen=True)
class Step:
    """One command of the run."""

    name: str
    share: float  # share of the total time
    command: tuple[str, ...]  # arguments of the Python interpreter; {out} is the folder of the results

    def run(self, out: Path, seconds: float) -> str:
        """Run the command, with its output in a log. Returns "ok" or what went wrong."""
        command = [sys.executable, *(part.format(out=out) for part in self.command)]
        variables = os.environ | {"PAGED_TEST_DEVICE": "cuda", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with (out / f"{self.name}.log").open("w") as log:
            try:
                done = subprocess.run(command, cwd=ROOT, env=variables, stdout=log, stderr=log, timeout=seconds)
            except subprocess.TimeoutExpired:
                return f"out of time after {seconds:.0f} s"
        return "ok" if done.returncode == 0 else f"failed with {done.returncode}"


def _bench(name: str, share: float, *arguments: str, file: str | None = None) -> Step:
    json_file = f"{{out}}/{file or name}.json"
    return Step(file or name, share, ("-c", PAGED, "bench", name, "--json", json_file, *arguments))


ENGINE_CHECKS = (
    "integration/test_equivalence", "engine/test_step_loop", "engine/test_prefix_disk", "scheduling/test_speculation",
    "scheduling/test_beam_search", "memory/test_transfers", "memory/test_kv_cache", "memory/test_disk",
    "engine/test_workers",
)  # fmt: skip
STEPS = (
    Step("checks", 0.2, ("-m", "pytest", "-q", "tests/kernels", "--deselect", "tests/kernels/test_aot.py")),
    Step("engine-checks", 0.1, ("-m", "pytest", "-q", *(f"tests/{name}.py" for name in ENGINE_CHECKS))),
    _bench("kernels", 0.15, file="kernels-before-tuning"),
    Step("tune", 0.15, ("-m", "paged_kernels.tune")),
    _bench("kernels", 0.15),
    _bench("engine", 0.25, "--model", "Qwen3-0.6B", "--workload", "nano", "--rounds", "2", file="engine-nano"),
    _bench("engine", 0.2, "--model", "Llama-3.1-8B", "--workload", "sharegpt", "--rounds", "2", file="engine-llama"),
    _bench("speculation", 0.05, "--dtype", "bfloat16"),
    _bench("server", 0.1),
)


def environment() -> dict[str, str]:
    """Return the current state of the GPU, and the versions of packages."""
    query = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    shown = ""
    if shutil.which(query[0]):
        shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    found = dict(zip(CLOCKS.split(","), shown.splitlines()[0].split(", "), strict=False)) if shown else {}
    return found | {name: version(name) for name in PACKAGES} | {"python": sys.version.split()[0]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="total time")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="run these steps only")
    parser.add_argument("--out", type=Path, help="folder of the results; default: a new one")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 2
    steps = [step for step in STEPS if not args.only or step.name in args.only]
    started = datetime.datetime.now()
    chip = torch.cuda.get_device_name().replace(" ", "-")
    out = (args.out or RESULTS / f"{started:%Y-%m-%d-%H%M}-{chip}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    before, deadline, ended = environment(), time.monotonic() + 60 * args.minutes, {}
    for index, step in enumerate(steps):
        left = deadline - time.monotonic()
        print(f"{step.name}: up to {left * _part(steps[index:]):.0f} s ...", flush=True)
        ended[step.name] = step.run(out, left * _part(steps[index:])) if left > 5 else "no time left"
        print(f"  {ended[step.name]}", flush=True)
        report = {"started": started.isoformat(), "before": before, "after": environment(), "steps": ended}
        (out / "run.json").write_text(json.dumps(report, indent=2) + "\n")
    return int(any(one != "ok" for one in ended.values()))


def _part(left: Sequence[Step]) -> float:
    """Return the first step's share of the remaining time."""
    return left[0].share / sum(step.share for step in left)


if __name__ == "__main__":
    sys.exit(main())
