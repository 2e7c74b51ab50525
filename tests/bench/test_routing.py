"""The benchmark of routing over several servers."""

import pytest

from paged_bench._conversations import Turn, hit_rate, recovery
from paged_client.cli import main
from tests.support.records import records_of


def run(file, *arguments):
    assert main(["bench", "routing", "--quick", *arguments, "--json", str(file)]) == 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return {name: record["value"] for name, record in records_of(file).items()}


@pytest.mark.nightly
def test_conversations_over_two_servers(tmp_path):
    value = run(tmp_path / "figures.json")
    assert 0 < value["hit rate, hashing"] <= 100
    assert value["hit rate over one server, hashing"] > 0.8
    assert 1 <= value["load of the busiest server over the mean, hashing"] < 2
    assert value["failed requests, hashing"] == 0


@pytest.mark.nightly
def test_loss_of_a_server(tmp_path):
    value = run(tmp_path / "figures.json", "--part", "loss", "--routing", "kv-events")
    (failed,) = [figure for name, figure in value.items() if name.startswith("failed requests of ")]
    assert failed == 0


@pytest.mark.nightly
def test_overhead(tmp_path):
    value = run(tmp_path / "figures.json", "--part", "overhead")
    assert value["throughput with routing, events, metrics and traces"] > 0


def turns(*hits):
    """Return turns with 10 prompt tokens in each second, of which so many are cached."""
    return [Turn(second + 0.5, 10, cached) for second, cached in enumerate(hits)]


def test_recovery_is_the_end_of_the_last_window_below_the_share():
    assert hit_rate(turns(5, 10)) == 0.75
    assert recovery(turns(8, 8, 2, 8, 4, 8, 8, 8), 2.0, 0.95, 1.0) == 3.0
    assert recovery(turns(8, 8, 8, 8, 8), 2.0, 0.95, 1.0) == 0.0
    assert recovery(turns(8, 8, 2, 2, 2), 2.0, 0.95, 1.0) is None
