"""The simulation of a fleet, as a benchmark."""

import pytest

from paged_client.cli import main
from tests.support.records import records_of


def run(file, *arguments):
    sizes = ["--quick", "--replicas", "4", "--replicas", "2", "--conversations", "60", "--blocks", "2048"]
    assert main(["bench", "fleet", *sizes, "--json", str(file), *arguments]) == 0
    return records_of(file)


def test_fleet_benchmark(tmp_path, capsys):
    records = run(tmp_path / "figures.json")
    printed = capsys.readouterr()
    assert "Qwen3-0.6B on an NVIDIA H100" in printed.out
    assert "4 replicas, hashing: 60 of 60 conversations" in printed.err
    assert len(records) == 2 * 4 * 4
    for replicas in (2, 4):
        rates = {
            policy: records[f"hit rate, {replicas} replicas, {policy}"]
            for policy in ("round-robin", "least-loaded", "hashing", "cache-aware")
        }
        assert rates["round-robin"]["value"] < rates["hashing"]["value"] < rates["hashing"]["limit"] < 100
        assert rates["hashing"]["target"] == pytest.approx(0.95 * rates["hashing"]["limit"])
        assert records[f"load imbalance, {replicas} replicas, hashing"]["value"] >= 1
        p50, p99 = (records[f"time to first token {one}, {replicas} replicas, hashing"] for one in ("p50", "p99"))
        assert 0 < p50["value"] < p99["value"]


@pytest.mark.nightly
def test_options_choose_policies_and_seed(tmp_path):
    first, again, other = (
        run(tmp_path / "figures.json", "--policy", "hashing", "--load", "0.5", "--seed", seed) for seed in "112"
    )
    assert {name.split(", ")[2] for name in first} == {"hashing"}
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "0"], "argument --replicas: '0': must be a whole number of at least 1"),
        (["--replicas", "4", "--replicas", "257"], "argument --replicas: '257': must be at most 256"),
        (["--conversations", "19"], "argument --conversations: '19': must be at least 20"),
        (["--policy", "random"], "argument --policy: invalid choice: 'random'"),
        (["--blocks", "511"], "argument --blocks: '511': must be at least 512"),
        (["--load", "2.1"], "argument --load: '2.1': must be at most 2"),
        (["--load", "x"], "argument --load: 'x': must be a number above 0"),
        (["--seed", "-1"], "argument --seed: '-1': must be a whole number of at least 1"),
    ],
)
def test_invalid_options_are_rejected(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "fleet", *arguments])
    assert message in capsys.readouterr().err
