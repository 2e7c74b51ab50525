"""Contestants that are absent or fail."""

from paged_bench._cpu_contestants import Contestants
from paged_bench._cpu_scenarios import VLLM_NAME, Scenario, output_rate
from paged_bench._workload import Job
from paged_bench.cpu import measure
from paged_bench.engine import OURS
from tests.support.benchmark_runs import run_of


def test_absent_and_failed_peers_are_reported():
    def fails(jobs):
        raise RuntimeError("out of memory\nand more")

    jobs = [Job([1, 2], 2), Job([3], 1)]
    contestants = Contestants({OURS: lambda jobs: run_of([1, 2], [3]), VLLM_NAME: fails}, {"another": "no wheel"})
    scenario = Scenario("words", jobs, output_rate, "tokens/s", {VLLM_NAME: 1.3, "another": 2.0})
    records = {one.name: one for one in measure(scenario, contestants, 10, rounds=2, exact=True)}
    assert records["words"].value == 3 and records["words"].peers == {}
    theirs, another = records[f"words: times {VLLM_NAME}"], records["words: times another"]
    assert (theirs.value, theirs.unit, theirs.target) == (None, "not measured: RuntimeError: out of memory", 1.3)
    assert (another.value, another.unit, another.target) == (None, "not measured: no wheel", 2.0)
