"""The command that runs all GPU checks and measurements, as far as it runs without a GPU."""

import functools
import json
import os
import select
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from paged_bench import on_gpu
from paged_bench._engine import TABLE
from paged_bench._harness import Record, Records
from paged_bench.on_gpu import DEMO_MODEL, EARLIER, ROOT, SERVER, STEPS, Step, compare, summarize, table
from tests.support.records import without_picture

# --- gpu steps --------------------------------------------------------------------------------------------------------


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
    assert names[:5] == ["checks", "checks-dependent_launches", "checks-producers", "model", "engine"]
    assert on_gpu.GROUPS == ("checks", "engine", "kernels", "more")
    assert len(set(names)) == len(names)


def test_checks_and_engine_take_ten_minutes_and_the_guide_names_all_limits():
    limits = {group: sum(step.limit for step in STEPS if step.group == group) for group in on_gpu.GROUPS}
    assert limits["checks"] + limits["engine"] <= 600
    guide = (ROOT / "docs/guides/new_gpu.md").read_text()
    for group, seconds in limits.items():
        shown = f"{seconds} s" if seconds < 1000 else f"{-(-seconds // 60)} min"
        assert f"| `{group}` | {shown} |" in guide


def test_what_never_ran_on_a_gpu_runs_in_steps_of_its_own():
    found = {step.name: step.features for step in STEPS if step.features}
    features = ("dependent_launches", "producers")
    assert found == {f"{group}-{one}": one for group in ("checks", "engine", "kernels") for one in features}


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
        raise on_gpu.ServerNotFoundError("none")

    monkeypatch.setattr(on_gpu, "find_server", not_found)
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
    assert all((ROOT / part).exists() for part in step.command if part.startswith("tests/"))


# --- gpu summary ------------------------------------------------------------------------------------------------------


def save(file, *records):
    Records("paged bench engine", file).extend(records)


def test_summary_has_both_runs(tmp_path):
    earlier = tmp_path / "figures.json"
    figures = {"output_throughput nano": {"unit": "tokens/s", "values": [18336, 18218]},
               "load to ready": {"unit": "s", "values": [68]}}  # fmt: skip
    earlier.write_text(json.dumps({"commit": "abc", "gpu": "H100", "figures": figures, "other": {}}))
    save(
        tmp_path / "engine.json",
        Record("output_throughput nano", 20000.5, "tokens/s", peers={"vLLM": 9.5}),
        Record("GPU idle nano", 3.0, "%"),
        Record("kernels compiled after ready nano", 2, "kernels"),
        Record("other", None, "not measured: no GPU"),
    )
    save(tmp_path / "again.json", Record("output_throughput nano", 5.0, "tokens/s"))
    lines = summarize(tmp_path, ["engine", "missing", "again"], earlier).splitlines()
    assert lines[0] == "earlier: H100, abc"
    assert [line.split() for line in lines[1:]] == [
        ["earlier", "now"],
        ["output_throughput", "nano", "18,218", "to", "18,336", "20,000", "tokens/s"],
        ["load", "to", "ready", "68", "-", "s"],
        ["output_throughput", "nano", "(vLLM)", "-", "9.5", "tokens/s"],
        ["kernels", "compiled", "after", "ready", "nano", "-", "2", "kernels"],
        ["output_throughput", "nano", "[again]", "-", "5", "tokens/s"],
    ]
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["earlier"] == {"commit": "abc", "gpu": "H100"}
    assert written["figures"]["GPU idle nano"] == {"unit": "%", "earlier": [], "now": 3.0}
    assert written["figures"]["output_throughput nano"]["earlier"] == [18336, 18218]


def test_figures_of_different_units_are_not_compared():
    both = compare({"a": {"unit": "ms", "values": [1]}}, {"a": (2.0, "s")})
    assert {name: (list(one.earlier), one.now, one.unit) for name, one in both.items()} == {
        "a": ([1], None, "ms"),
        "a [s]": ([], 2.0, "s"),
    }


def test_stored_figures_have_every_workload_of_the_table():
    stored = json.loads(EARLIER.read_text())
    for name in ("nano", *TABLE):
        assert f"output_throughput {name}" in stored["figures"]
        for what in ("time to first token p50", "time between tokens p50", "time between tokens p99"):
            assert f"{what} {name} (paged)" in stored["figures"]
    assert "output_throughput 1x128/256" in table(compare(stored["figures"], {}))
    assert stored["decode_step_ms"].keys() == {"1 sequence", "16 of 512", "256 of 512"}


# --- on gpu -----------------------------------------------------------------------------------------------------------


MISSING = ("pytest", "tritonclient", "grpc", "matplotlib", "llguidance", "gguf", "jsonschema", "vllm", "flashinfer")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_exits_with_an_error(capsys):
    assert on_gpu.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_only_the_steps_of_a_group_run(monkeypatch, tmp_path):
    steps = tuple(Step(group, 60, ("-c", "pass"), group=group) for group in on_gpu.GROUPS)
    monkeypatch.setattr(on_gpu, "STEPS", steps)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert on_gpu.main(["--group", "checks", "engine", "--out", str(tmp_path)]) == 0
    assert list(json.loads((tmp_path / "run.json").read_text())["steps"]) == ["checks", "engine"]


def test_features_of_a_step_reach_its_processes(tmp_path):
    script = "import os; print(os.environ['PAGED_GPU_FEATURES'])"
    assert Step("some", 60, ("-c", script), features="producers").run(tmp_path, 60, {}) == "ok"
    assert (tmp_path / "some.log").read_text() == "producers\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_script_for_a_machine_without_network(tmp_path):
    (tmp_path / "installed").mkdir()  # what pip would install of the packed wheels
    command = [str(ROOT / "kernels/bench/card/run.sh"), str(tmp_path), "checks", "engine"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "no GPU: nothing to measure\n")


def test_run_continues_after_a_step_that_fails_or_takes_too_long(monkeypatch, tmp_path, capsys):
    steps = (
        Step("wrong", 60, ("-c", "print('here'); raise SystemExit(3)")),
        Step("slow", 1, ("-c", "import threading; threading.Event().wait()")),
        Step("absent", 60, ("-c", "raise SystemExit(3)"), ("no_such_package",)),
        Step("right", 60, ("-c", "print('{out}')")),
    )
    monkeypatch.setattr(on_gpu, "STEPS", steps)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert on_gpu.main(["--minutes", "5", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["steps"] == {
        "wrong": "failed with 3",
        "slow": "stopped after 1 s",
        "absent": "skipped: no_such_package is not installed",
        "right": "ok",
    }
    assert (tmp_path / "right.log").read_text().strip() == str(tmp_path)
    assert report["before"]["torch"] == version("torch")
    assert on_gpu.main(["--minutes", "0.01", "--out", str(tmp_path), "--only", "right"]) == 1  # no step has a result
    assert "load to ready" in capsys.readouterr().out


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_invalid_time(minutes, capsys):
    with pytest.raises(SystemExit):
        on_gpu.main(["--minutes", minutes])
    assert f"'{minutes}': must be a number above 0" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="rehearses the run on a CPU")
def test_run_with_the_packages_of_the_engine_only(tiny, tmp_path):
    """On a machine without the packages in MISSING, and without the demo model."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({MISSING!r})\n")
    paths = [str(blocked), str(ROOT), str(ROOT / "kernels"), str(ROOT / "client")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PAGED_CACHE_DIR": str(tmp_path / "cache")}
    out = tmp_path / "out"
    command = [sys.executable, "-m", "paged_bench.on_gpu", "--rehearse", str(tiny[0]), "--minutes", "300"]
    done = subprocess.run([*command, "--out", str(out)], env=environment, capture_output=True, text=True, check=False)
    logs = "".join(file.read_text() for file in sorted(out.glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    report = json.loads((out / "run.json").read_text())
    assert list(report["steps"]) == [step.name for step in STEPS]
    skipped = {name: result for name, result in report["steps"].items() if result != "ok"}
    assert not {"checks", "engine", "kernels-quick"} & skipped.keys()
    assert skipped["vllm"] == "skipped: vllm is not installed"
    assert skipped["kernel-tests"] == skipped["engine-tests"] == "skipped: pytest is not installed"
    assert skipped["server"] == "skipped: tritonclient is not installed"
    assert skipped["speculation"].startswith("skipped: the demo model is not prepared")
    assert skipped["tune"] == "skipped: no GPU"
    records = without_picture(out / "engine.json")
    assert records["output_throughput 2x8/4"]["value"] > 0
    assert records["load to ready"]["value"] > 0
    figures = json.loads((out / "summary.json").read_text())["figures"]
    assert figures["output_throughput 2x8/4"]["now"] == records["output_throughput 2x8/4"]["value"]
    assert "2x8/4" in done.stdout
