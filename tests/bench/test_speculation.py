"""The benchmark of speculative decoding."""

import pytest

from paged_client.cli import main
from tests.support.records import records_of


@pytest.mark.nightly
def test_speculation_benchmark(tiny, tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--quick", "--length", "20", "--output", "12", "--draft-tokens", "3"]
    assert main(["bench", "speculation", *arguments, "--draft", str(tiny[0]), "--json", str(file)]) == 0
    assert "round 1 of 1: none" in capsys.readouterr().err
    value = {name: record["value"] for name, record in records_of(file).items()}
    for kind in ("repeating a text", "going on with one"):
        assert value[f"{kind}: accepted (draft model, 3)"] > 95  # the model is its own draft model
        assert value[f"{kind}: tokens_per_step (draft model, 3)"] > 3
        assert value[f"{kind}: throughput_ratio (prompt lookup, 3)"] > 0
