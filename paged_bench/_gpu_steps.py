"""The steps of `make bench-gpu`, most valuable first, and how one is run: with a limit, and without what is missing."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from paged_bench._workload import MODELS, TABLE
from paged_client.serving import demo_model
from paged_client.serving.server_files import ServerNotFoundError, find_server

ROOT = Path(__file__).resolve().parents[1]
MARK = "PAGED_BENCH_STEP"  # an environment variable of all processes of a step
GPU, DEMO_MODEL, SERVER = "a GPU", "the demo model", "tritonserver"
OK = "ok"


@dataclass(frozen=True)
class Step:
    """One command of the run."""

    name: str
    limit: float  # seconds
    command: tuple[str, ...]  # arguments of the Python interpreter; {out} is the folder of the results
    needs: tuple[str, ...] = ()  # packages, GPU, DEMO_MODEL or SERVER

    def missing(self) -> str | None:
        """Return the reason why the step cannot run on this machine."""
        return next((reason for reason in map(_missing, self.needs) if reason), None)

    def run(self, out: Path, seconds: float, variables: Mapping[str, str]) -> str:
        """Run the command, with its output in a log. Returns OK or what went wrong.

        After `seconds` all its processes are killed. The files that it has written until then stay.
        """
        mark = secrets.token_hex(16)
        command = [sys.executable, *(part.format(out=out) for part in self.command)]
        environment = os.environ | dict(variables) | {MARK: mark}
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
        found = list(_marked(mark))
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.1)  # a process takes a while to end, and may have started another one before it was killed


def _marked(mark: str) -> Iterator[int]:
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if f"{MARK}={mark}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                yield int(directory.name)


def _bench(step: str, limit: float, name: str, *arguments: str, needs: tuple[str, ...] = ()) -> Step:
    """Return a step that runs `paged bench NAME`, without the packages that the other commands of `paged` import."""
    run = f"import sys; from paged_bench.{name} import main; sys.exit(main(sys.argv[1:]))"
    return Step(step, limit, ("-c", run, "--json", f"{{out}}/{step}.json", *arguments), needs)


def _pytest(step: str, limit: float, *arguments: str) -> Step:
    """Return a step that runs tests, with a process per core if pytest-xdist is installed: most of it is compiling."""
    cores = len(os.sched_getaffinity(0))
    parallel = ("-n", str(cores), "--dist=load", "--maxschedchunk=1") if find_spec("xdist") else ()
    return Step(step, limit, ("-m", "pytest", "-q", *parallel, *arguments), ("pytest",))


def _workloads(*names: str) -> tuple[str, ...]:
    return tuple(part for name in names for part in ("--workload", name))


ENGINE_TESTS = (
    "integration/test_equivalence", "engine/test_step_loop", "engine/test_prefix_tiers", "scheduling/test_speculation",
    "scheduling/test_beam_search", "memory/test_transfers", "memory/test_kv_cache", "memory/test_disk",
    "engine/test_workers",
)  # fmt: skip
QWEN = ("--model", "Qwen3-0.6B", "--rounds", "2")
STEPS = (
    Step("checks", 120, ("-m", "paged_bench._kernel_checks", "--processes", "8", "--json", "{out}/checks.json")),
    Step("model", 240, ("-m", "paged_bench._model_check", "--json", "{out}/model.json"), (DEMO_MODEL,)),
    _bench("engine", 420, "engine", *QWEN, "--alone", *_workloads("nano", *TABLE)),
    _bench("kernels-quick", 150, "kernels", "--quick"),
    _bench("vllm", 300, "engine", *QWEN, "--peers", "vllm", *_workloads("nano", *TABLE[:3], TABLE[4]), needs=("vllm",)),
    _pytest(
        "kernel-tests", 300, "tests/kernels", "--ignore=tests/kernels/cpu", "--deselect", "tests/kernels/test_aot.py"
    ),
    _pytest("engine-tests", 300, *(f"tests/{name}.py" for name in ENGINE_TESTS)),
    _bench("kernels", 400, "kernels"),
    Step("tune", 150, ("-m", "paged_kernels.tune", "--model", str(MODELS / QWEN[1]))),
    _bench("llama", 240, "engine", "--model", "Llama-3.1-8B", "--rounds", "2", "--alone", *_workloads("sharegpt")),
    _bench("speculation", 90, "speculation", "--dtype", "bfloat16", needs=(DEMO_MODEL,)),
    _bench("server", 240, "server", needs=("tritonclient", SERVER, DEMO_MODEL)),
    _bench("transformers", 300, "engine", *QWEN[:2], "--rounds", "1", "--peers", "transformers", *_workloads("nano")),
)


def rehearsal(model: str) -> tuple[Step, ...]:
    """Return STEPS for a machine without a GPU, to test the run: the first ones with a small model and few inputs."""
    small = ("--model", model, "--alone", "--quick", "--requests", "2", *_workloads("mixed", "2x8/4"))
    long = 3600.0  # the machine may be slow
    instead = {
        "checks": replace(STEPS[0], limit=long),
        "engine": _bench("engine", long, "engine", *small),
        "kernels-quick": _bench("kernels-quick", long, "kernels", "--quick", "--only", "decode"),
    }
    return tuple(instead.get(step.name) or replace(step, needs=(*step.needs, GPU)) for step in STEPS)
