"""The benchmarks with a Redis server: cache tiers and disaggregation."""

import os

import pytest

from paged_bench import disaggregation, tiers
from paged_client.cli import main
from tests.support.processes import needs_server
from tests.support.records import records_of
from tests.support.redis_server import needs_redis

# --- tiers ------------------------------------------------------------------------------------------------------------


TIERS = ["--quick", "--tokens", "96", "--length", "16", "--output", "4", "--swap-space", "1"]


def run_tiers(tiny, file):
    assert main(["bench", "tiers", "--model", str(tiny[0]), *TIERS, "--json", str(file)]) == 0
    return records_of(file)


@pytest.mark.nightly
@needs_redis
def test_tiers_benchmark(tiny, tmp_path):
    records = run_tiers(tiny, tmp_path / "figures.json")
    for name in ("computed", "host", "disk", "remote"):
        assert records[f"time to first token, 96 tokens, {name}"]["value"] > 0
    assert records["time to first token, 96 tokens, remote / computed"]["target"] == 0.3
    for name in ("killed", "not answering"):
        assert records[f"duration of requests, store {name} / no tier"]["target"] == 1.2
    assert records["cost of a block, remote"]["value"] > 0


def test_remote_store_is_not_measured_without_a_server(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "find_redis", lambda: None)
    records = run_tiers(tiny, tmp_path / "figures.json")
    assert records["time to first token, 96 tokens, disk"]["value"] > 0
    for name in ("time to first token, 96 tokens, remote", "duration of requests"):
        assert records[name]["unit"] == "not measured: no redis-server"


# --- disaggregation ---------------------------------------------------------------------------------------------------


DISAGGREGATION = ["--quick", "--seconds", "2", "--streams", "2", "--prompt", "8", "--output", "16", "--long", "96"]
P99 = "time between tokens p99, disaggregated / mixed"


def run_disaggregation(tiny, file):
    assert main(["bench", "disaggregation", "--model", str(tiny[0]), *DISAGGREGATION, "--json", str(file)]) == 0
    return records_of(file)


@pytest.mark.nightly
@needs_redis
@needs_server
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_disaggregation_benchmark(tiny, tmp_path):
    records = run_disaggregation(tiny, tmp_path / "figures.json")
    for name in ("mixed", "disaggregated"):
        for share in ("p50", "p99"):
            assert records[f"time between tokens {share}, {name}"]["value"] > 0
        assert records[f"time to first token of long prompts, {name}"]["value"] > 0
    assert records[P99]["target"] == 0.5
    assert records["share of the long prompts' blocks that the decode server has read"]["value"] == 1


def test_disaggregation_is_not_measured_without_a_store(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(disaggregation, "find_redis", lambda: None)
    records = run_disaggregation(tiny, tmp_path / "figures.json")
    assert records[P99]["unit"] == "not measured: needs redis-server and at least 2 cores"
