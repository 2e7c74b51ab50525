"""The command that runs all GPU checks and measurements, as far as it runs without a GPU."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from paged_bench import on_gpu
from paged_bench._gpu_steps import ROOT, STEPS, Step
from tests.support.records import without_picture

MISSING = ("pytest", "tritonclient", "grpc", "matplotlib", "llguidance", "gguf", "jsonschema", "vllm", "flashinfer")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_exits_with_an_error(capsys):
    assert on_gpu.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


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
    assert list(report["steps"])[:4] == ["checks", "model", "engine", "kernels-quick"]
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
