"""The benchmark of LoRA adapters."""

from paged_client.cli import main
from tests.support.records import records_of


def test_lora_benchmark(tiny, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--model", str(tiny[0]), "--rows", "4", "--adapters", "2", "--rounds", "1"]
    assert main(["bench", "lora", *arguments, "--json", str(file)]) == 0
    value = {name: record["value"] for name, record in records_of(file).items()}
    assert all(value[f"step of 4 rows, {number} adapters"] > 0 for number in (0, 1, 2))
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
