"""The checks of kernels and of a real model that run on a GPU; here on the CPU."""

import json

import pytest
import torch

from paged_bench import _kernel_checks, _model_check
from paged_bench._attention import AttentionInputs
from paged_kernels.cpu import native
from tests.support.operations import DISPATCHES

# --- kernel checks ----------------------------------------------------------------------------------------------------


def test_all_kernels_pass(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(native, "_avoided_tiles", [])  # by tests before this one
    file = tmp_path / "checks.json"
    assert _kernel_checks.main(["--json", str(file)]) == 0
    records = {record["name"]: record for record in json.loads(file.read_text())["records"]}
    checked = {name.removeprefix("check: ").partition(",")[0] for name in records}
    assert checked == {names[0] for names in DISPATCHES}
    assert all(record["value"] <= record["limit"] for record in records.values())
    assert f"{len(records)} of {len(records)} kernel checks passed" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ("swiglu", "swiglu"),
        ("paged_attention", "paged_attention, "),
        ("add_rms_norm", "add_rms_norm"),
        ("sample", "sample, "),
    ],
)
def test_wrong_results_fail(wrong, name, monkeypatch):
    right = getattr(_kernel_checks.ops, wrong)

    def spoil(*arguments, **named):
        result = right(*arguments, **named)
        for one in result if isinstance(result, tuple) else (result,):
            one[-1] += 1
        return result

    monkeypatch.setattr(_kernel_checks.ops, wrong, spoil)
    assert failing() == {one for one in _kernel_checks.CHECKS if one.startswith(name)}


def test_one_check_reads_a_shared_prefix():
    shared = [cell for cell in _kernel_checks.CELLS if cell.shared]
    assert shared and all(AttentionInputs(cell, torch.device("cpu"), 0).sharing(0).shared for cell in shared)


@pytest.mark.nightly
def test_wrong_writes_fail(monkeypatch):
    def nothing(*arguments, **named):
        return arguments[0]

    for one in ("kv_write", "rope_kv_write", "block_copy"):
        monkeypatch.setattr(_kernel_checks.ops, one, nothing)
    names = ("kv_write, ", "rope_kv_write", "block_copy")
    assert {one for one in _kernel_checks.CHECKS if one.startswith(names)} <= failing()


@pytest.mark.nightly
def test_kernel_that_does_not_compile_fails_alone(monkeypatch, tmp_path, capsys):
    def broken(*arguments):
        raise RuntimeError("no compiler\nat line 7")

    monkeypatch.setattr(_kernel_checks.ops, "swiglu", broken)
    file = tmp_path / "checks.json"
    assert _kernel_checks.main(["--json", str(file)]) == 1
    records = json.loads(file.read_text())["records"]
    assert [one["unit"] for one in records if one["value"] is None] == ["not measured: RuntimeError: no compiler"]
    assert len(records) == len(_kernel_checks.CHECKS)


def failing():
    return {name for name in _kernel_checks.CHECKS if not _kernel_checks.run(name)[0]}


# --- model check ------------------------------------------------------------------------------------------------------


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
