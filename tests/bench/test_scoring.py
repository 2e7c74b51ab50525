"""The benchmark of cached log probabilities."""

from paged_bench import scoring
from paged_client.cli import main
from tests.support.records import records_of

ARGUMENTS = ["--quick", "--tokens", "96", "--length", "4", "--continuations", "5", "--rounds", "2"]


def test_scoring_benchmark(tiny, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert main(["bench", "scoring", "--model", str(tiny[0]), *ARGUMENTS, "--json", str(file)]) == 0
    assert "round 2 of 2: computed" in capsys.readouterr().err
    records, what = records_of(file), "5 continuations of 96 tokens"
    assert records[f"{what}, cached"]["value"] > 0 and records[f"{what}, computed"]["value"] > 0
    assert records[f"{what}, cached / computed"]["target"] == 5
    differing = records["log probabilities that differ"]
    assert (differing["value"], differing["unit"]) == (0, "of 990")
    assert file.with_suffix(".png").stat().st_size


def test_only_continuations_are_computed(tiny, tmp_path, monkeypatch, capsys):
    """The cached engine computes the prompt once, the other one for each request."""
    computed = {}

    def counting(assembly, prompts):
        before = assembly.scheduler.stats
        found = score(assembly, prompts)
        after = assembly.scheduler.stats
        hits = after.cached_tokens - before.cached_tokens
        computed[assembly.scheduler.blocks.caching] = after.queried_tokens - before.queried_tokens - hits
        return found

    score = scoring.score
    monkeypatch.setattr(scoring, "score", counting)
    assert main(["bench", "scoring", "--model", str(tiny[0]), *ARGUMENTS, "--max-num-seqs", "1"]) == 0
    assert computed == {True: 100 + 4 * 5, False: 500}
