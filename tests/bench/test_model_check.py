"""The check of a real model, on a CPU: it passes, and it fails if a token differs."""

import json

import pytest

from paged_bench import _model_check


@pytest.mark.nightly
def test_demo_model_passes(tmp_path):
    file = tmp_path / "model.json"
    assert _model_check.main(["--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["complete"]
    records = {one["name"]: one for one in report["records"]}
    assert records["server: answers that are right"]["value"] == 1
    plain, preempted, drafted = (one for name, one in records.items() if name.startswith("requests with the tokens"))
    assert plain["value"] == preempted["value"] == drafted["value"] == _model_check.REQUESTS
    assert plain["peers"] == {"swapped out": 0, "accepted draft tokens": 0}
    assert preempted["peers"]["swapped out"] > 0
    assert drafted["peers"]["accepted draft tokens"] > 0


@pytest.mark.nightly
def test_a_wrong_token_fails(monkeypatch, tmp_path):
    file, run = tmp_path / "model.json", _model_check.run_paged

    def spoiled(assembly, jobs):
        found = run(assembly, jobs)
        found.outputs[3][-1] += 1
        return found

    monkeypatch.setattr(_model_check, "run_paged", spoiled)
    monkeypatch.setattr(_model_check, "VARIANTS", {"float32": {"dtype": "float32"}})
    monkeypatch.setattr(_model_check, "answered", lambda args, records: True)
    assert _model_check.main(["--json", str(file)]) == 1
    records = {one["name"]: one["value"] for one in json.loads(file.read_text())["records"]}
    assert records["requests with the tokens of transformers, float32"] == _model_check.REQUESTS - 1
