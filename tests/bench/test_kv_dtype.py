"""The benchmark of KV cache data types."""

import pytest

from paged_client.cli import main
from tests.support.records import records_of


def test_window_longer_than_the_context_is_rejected(tiny, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "kv_dtype", "--quick", "--model", str(tiny[0]), "--length", "100000"])
    assert "argument --length: 100000: must be at most" in capsys.readouterr().err


@pytest.mark.nightly
def test_kv_dtype_benchmark(tiny, tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--quick", "--windows", "2", "--length", "40", "--json", str(file)]
    assert main(["bench", "kv_dtype", *arguments]) == 0
    assert "2 windows of 40 tokens" in capsys.readouterr().out
    value = {name: record["value"] for name, record in records_of(file).items()}
    assert [value[f"bytes per token {kind}"] for kind in ("auto", "fp8", "int8")] == [12 * 64, 12 * 20, 12 * 20]
    assert value["KL divergence auto"] == 0
    assert 0 < value["KL divergence int8"] < value["KL divergence fp8"]
    assert value["same top token auto"] == 100
