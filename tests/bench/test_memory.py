"""The benchmark of memory: wasted slots, sharing, and layers that keep less than all keys and values."""

import pytest

from paged_bench._cache_simulation import MODELS
from paged_client.cli import main
from tests.support.records import records_of


@pytest.mark.nightly
def test_memory_benchmark(tiny, tmp_path):
    file = tmp_path / "figures.json"
    assert main(["bench", "memory", "--model", str(tiny[0]), "--quick", "--json", str(file)]) == 0
    records = records_of(file)
    waste = [records[f"waste ShareGPT block_size={size}"]["value"] for size in (1, 4, 16, 64, 256)]
    assert waste[0] == 0
    assert waste == sorted(waste)
    assert records["waste ShareGPT block_size=16"]["peers"]["contiguous, oracle"] > waste[2]
    for model in MODELS:
        for length in ("8,192", "32,768"):
            held = records[f"memory, {model.name}, {length} tokens"]
            assert 1 <= held["value"] <= held["target"] < held["peers"]["all kept"]
            assert held["peers"].get("with a checkpoint", 2) > held["value"]
            fits = records[f"requests in 64 GiB, {model.name}, {length} tokens"]
            assert fits["value"] > fits["peers"]["all kept"]
    for n in (2, 4):
        saved = records[f"saved by sharing ShareGPT n={n}"]
        assert abs(saved["value"] - saved["peers"]["by arithmetic"]) < 1
