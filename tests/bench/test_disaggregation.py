"""The benchmark of prefill/decode disaggregation."""

import os

import pytest

from paged_bench import disaggregation
from paged_client.cli import main
from tests.support.processes import needs_server
from tests.support.records import records_of
from tests.support.redis_server import needs_redis

ARGUMENTS = ["--quick", "--seconds", "2", "--streams", "2", "--prompt", "8", "--output", "16", "--long", "96"]
P99 = "time between tokens p99, disaggregated / mixed"


def run(tiny, file):
    assert main(["bench", "disaggregation", "--model", str(tiny[0]), *ARGUMENTS, "--json", str(file)]) == 0
    return records_of(file)


@pytest.mark.nightly
@needs_redis
@needs_server
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_disaggregation_benchmark(tiny, tmp_path):
    records = run(tiny, tmp_path / "figures.json")
    for name in ("mixed", "disaggregated"):
        for share in ("p50", "p99"):
            assert records[f"time between tokens {share}, {name}"]["value"] > 0
        assert records[f"time to first token of long prompts, {name}"]["value"] > 0
    assert records[P99]["target"] == 0.5
    assert records["share of the long prompts' blocks that the decode server has read"]["value"] == 1


def test_disaggregation_is_not_measured_without_a_store(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(disaggregation, "find_redis", lambda: None)
    records = run(tiny, tmp_path / "figures.json")
    assert records[P99]["unit"] == "not measured: needs redis-server and at least 2 cores"
