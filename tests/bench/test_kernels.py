"""The benchmark of kernels. Measured times are not checked."""

import pytest
import torch

from paged_bench._lines import LINES
from paged_client.cli import main
from paged_kernels.cpu import native
from tests.support.records import records_of


@pytest.mark.nightly
def test_kernels_benchmark(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert main(["bench", "kernels", "--quick", "--only", "decode", "--json", str(file)]) == 0
    records = records_of(file)
    errors = {name: record for name, record in records.items() if name.endswith(": error")}
    assert len(errors) >= 1
    for record in errors.values():
        assert all(value < record["limit"] for value in (record["value"], *record["peers"].values()))
        assert "SDPA, contiguous" in record["peers"]
        if native.levels() and not torch.cuda.is_available():
            lower = {*native.levels(), "PyTorch"} - {native.level(), "amx_emulated"}
            assert {f"paged, {one}" for one in lower} <= record["peers"].keys()
    assert all(records[f"{name}, 16 tokens"]["value"] > 0 for name in LINES)
    if not torch.cuda.is_available():
        (cell,) = (name for name in records if name.startswith("decode") and ":" not in name)
        assert records[f"{cell}: flex_attention, contiguous"]["unit"] == "not measured: no GPU"
        assert records[cell]["limit"] == records["read-only stream"]["value"]
    assert "gather + SDPA" in capsys.readouterr().out
