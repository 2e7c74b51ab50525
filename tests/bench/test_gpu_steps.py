"""The steps of `make bench-gpu`: their order, limits and what they need."""

import functools
import itertools
import json
import os
import select
import subprocess
import sys

import pytest

from paged_bench import _gpu_steps
from paged_bench._gpu_steps import DEMO_MODEL, SERVER, STEPS, Step

HANG = "import threading; threading.Event().wait()"
# Writes a record, and starts a process that never ends, in a session of its own.
PARTIAL = f"""
import json, subprocess, sys
with open(sys.argv[1], "w") as file:
    json.dump([{{"name": "one"}}], file)
print(subprocess.Popen([sys.executable, "-c", {HANG!r}], start_new_session=True).pid, flush=True)
"""


def test_most_valuable_steps_come_first():
    names = [step.name for step in STEPS]
    assert names[:4] == ["checks", "model", "engine", "kernels-quick"]
    engine = STEPS[2].command
    workloads = [value for flag, value in itertools.pairwise(engine) if flag == "--workload"]
    assert workloads == ["nano", *_gpu_steps.TABLE]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("after", "result"), [(HANG, "stopped after 8 s"), ("", "ok")])
def test_step_keeps_its_results_and_leaves_no_process(after, result, tmp_path):
    step = Step("partial", 60, ("-c", PARTIAL.replace("{", "{{").replace("}", "}}") + after, "{out}/partial.json"))
    assert step.run(tmp_path, 8, {}) == result
    assert json.loads((tmp_path / "partial.json").read_text()) == [{"name": "one"}]
    assert ended(int((tmp_path / "partial.log").read_text()))


def ended(pid):
    """Return whether a process has ended; it may not have been reaped."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    found, _, _ = select.select([watched], [], [], 60)
    os.close(watched)
    return bool(found)


def test_missing_packages_and_files_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "absent", None)
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path))
    step = Step("one", 1, ())
    assert step.missing() is None
    for needs, reason in (
        (("json", "absent"), "absent is not installed"),
        ((DEMO_MODEL,), "the demo model is not prepared (make demo-model)"),
    ):
        assert Step("one", 1, (), needs).missing() == reason

    def not_found():
        raise _gpu_steps.ServerNotFoundError("none")

    monkeypatch.setattr(_gpu_steps, "find_server", not_found)
    assert Step("one", 1, (), (SERVER,)).missing() == "tritonserver is not installed"


@functools.cache
def help_of(module):
    return subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_steps_are_existing_commands(step, monkeypatch, capsys):
    """Benchmarks run in this process, which has loaded their packages."""
    kind, command, *arguments = step.command
    if kind == "-c":
        monkeypatch.setattr(sys, "argv", ["-c", *(part.format(out="/tmp") for part in arguments), "--help"])
        with pytest.raises(SystemExit) as ended:
            exec(command, {})
        code, output = ended.value.code, capsys.readouterr().out
    else:  # -m MODULE
        done = help_of(command)
        code, output = done.returncode, done.stdout
    assert not code
    assert "usage" in output
    assert all((_gpu_steps.ROOT / part).exists() for part in step.command if part.startswith("tests/"))
