"""The benchmark of mixtures of experts."""

import pytest

from paged_client.cli import main
from paged_kernels.cpu import native
from tests.support.records import records_of


@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
def test_experts_benchmark(tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--shape", "8x2x64x32", "--rows", "1", "--rows", "5", "--rounds", "1", "--dtype", "float32"]
    assert main(["bench", "experts", *arguments, "--json", str(file)]) == 0
    value = {name: record["value"] for name, record in records_of(file).items()}
    for rows in (1, 5):
        for name in ("packed", "int8", "int4", "transformers, grouped_mm", "transformers, loop over experts"):
            assert value[f"{rows} rows, {name}"] > 0
        errors = [value[f"{rows} rows, error of {name}"] for name in ("packed", "int8", "int4")]
        assert errors[0] < 1e-5 < errors[1] < 0.05 and errors[1] < errors[2] < 0.3
        assert value[f"{rows} rows, speed of packed over transformers"] > 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("shape", ["8x2x64", "8xax64x32", "0x2x64x32", "2x3x64x32"])
def test_invalid_shapes(shape, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "experts", "--shape", shape])
    assert shape in capsys.readouterr().err
