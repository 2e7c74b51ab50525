"""The command that runs all GPU checks and measurements, as far as it runs without a GPU."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from paged_bench import on_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_exits_with_an_error(capsys):
    assert on_gpu.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_run_continues_after_a_step_that_fails_or_takes_too_long(monkeypatch, tmp_path):
    steps = (
        on_gpu.Step("wrong", 0.1, ("-c", "print('here'); raise SystemExit(3)")),
        on_gpu.Step("slow", 0.1, ("-c", "import threading; threading.Event().wait()")),
        on_gpu.Step("right", 0.8, ("-c", "print('{out}')")),
    )
    monkeypatch.setattr(on_gpu, "STEPS", steps)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert on_gpu.main(["--minutes", "0.5", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "run.json").read_text())
    assert list(report["steps"]) == ["wrong", "slow", "right"]
    assert report["steps"]["wrong"] == "failed with 3"
    assert report["steps"]["slow"].startswith("out of time after")
    assert report["steps"]["right"] == "ok"
    assert (tmp_path / "right.log").read_text().strip() == str(tmp_path)
    assert report["before"]["torch"] == version("torch")


@pytest.mark.parametrize("step", on_gpu.STEPS, ids=lambda step: step.name)
def test_steps_are_existing_commands(step):
    kept = step.command[:4] if step.command[0] == "-c" else step.command[:2]  # … bench NAME, or -m MODULE
    done = subprocess.run([sys.executable, *kept, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout
    assert all((on_gpu.ROOT / part).exists() for part in step.command if part.startswith("tests/"))
