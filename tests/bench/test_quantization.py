"""The benchmark of weight data types."""

import pytest
import torch

from paged_client.cli import main
from tests.support.records import records_of


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="needs AVX512-VNNI")
def test_quantization_benchmark(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("paged_backend.models.linear.MIN_ELEMENTS", 0)
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--model", str(tiny[0]), "--windows", "2", "--length", "40", "--json", str(file)]
    assert main(["bench", "quantization", *arguments]) == 0
    value = {name: record["value"] for name, record in records_of(file).items()}
    assert value["KL divergence float32"] == 0
    assert 0 < value["KL divergence bfloat16"] < value["KL divergence int8"]
    assert value["same top token float32"] == 100
    assert value["step of 16 int8"] > 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
