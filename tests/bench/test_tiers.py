"""The benchmark of cache tiers."""

import pytest

from paged_bench import tiers
from paged_client.cli import main
from tests.support.records import records_of
from tests.support.redis_server import needs_redis

ARGUMENTS = ["--quick", "--tokens", "96", "--length", "16", "--output", "4", "--swap-space", "1"]


def run(tiny, file):
    assert main(["bench", "tiers", "--model", str(tiny[0]), *ARGUMENTS, "--json", str(file)]) == 0
    return records_of(file)


@pytest.mark.nightly
@needs_redis
def test_tiers_benchmark(tiny, tmp_path):
    records = run(tiny, tmp_path / "figures.json")
    for name in ("computed", "host", "disk", "remote"):
        assert records[f"time to first token, 96 tokens, {name}"]["value"] > 0
    assert records["time to first token, 96 tokens, remote / computed"]["target"] == 0.3
    for name in ("killed", "not answering"):
        assert records[f"duration of requests, store {name} / no tier"]["target"] == 1.2
    assert records["cost of a block, remote"]["value"] > 0


def test_remote_store_is_not_measured_without_a_server(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "find_redis", lambda: None)
    records = run(tiny, tmp_path / "figures.json")
    assert records["time to first token, 96 tokens, disk"]["value"] > 0
    for name in ("time to first token, 96 tokens, remote", "duration of requests"):
        assert records[name]["unit"] == "not measured: no redis-server"
