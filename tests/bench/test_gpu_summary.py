"""The figures of a run beside those of an earlier one."""

import json

from paged_bench._gpu_summary import compare, summarize, table
from paged_bench._report import Record, Records, arguments, parser
from paged_bench._workload import TABLE
from paged_bench.on_gpu import EARLIER


def save(file, *records):
    Records(arguments(parser("engine", ""), ["--json", str(file)], {}), records)


def test_summary_has_both_runs(tmp_path):
    earlier = tmp_path / "figures.json"
    figures = {"output_throughput nano": {"unit": "tokens/s", "values": [18336, 18218]},
               "load to ready": {"unit": "s", "values": [68]}}  # fmt: skip
    earlier.write_text(json.dumps({"commit": "abc", "gpu": "H100", "figures": figures, "other": {}}))
    save(
        tmp_path / "engine.json",
        Record("output_throughput nano", 20000.5, "tokens/s", peers={"vLLM": 9.5}),
        Record("GPU idle nano", 3.0, "%"),
        Record("kernels compiled after ready nano", 2, "kernels"),
        Record("other", None, "not measured: no GPU"),
    )
    save(tmp_path / "again.json", Record("output_throughput nano", 5.0, "tokens/s"))
    lines = summarize(tmp_path, ["engine", "missing", "again"], earlier).splitlines()
    assert lines[0] == "earlier: H100, abc"
    assert [line.split() for line in lines[1:]] == [
        ["earlier", "now"],
        ["output_throughput", "nano", "18,218", "to", "18,336", "20,000", "tokens/s"],
        ["load", "to", "ready", "68", "-", "s"],
        ["output_throughput", "nano", "(vLLM)", "-", "9.5", "tokens/s"],
        ["kernels", "compiled", "after", "ready", "nano", "-", "2", "kernels"],
        ["output_throughput", "nano", "[again]", "-", "5", "tokens/s"],
    ]
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["earlier"] == {"commit": "abc", "gpu": "H100"}
    assert written["figures"]["GPU idle nano"] == {"unit": "%", "earlier": [], "now": 3.0}
    assert written["figures"]["output_throughput nano"]["earlier"] == [18336, 18218]


def test_figures_of_different_units_are_not_compared():
    both = compare({"a": {"unit": "ms", "values": [1]}}, {"a": (2.0, "s")})
    assert {name: (list(one.earlier), one.now, one.unit) for name, one in both.items()} == {
        "a": ([1], None, "ms"),
        "a [s]": ([], 2.0, "s"),
    }


def test_stored_figures_have_every_workload_of_the_table():
    stored = json.loads(EARLIER.read_text())
    for name in ("nano", *TABLE):
        assert f"output_throughput {name}" in stored["figures"]
        for what in ("time to first token p50", "time between tokens p50", "time between tokens p99"):
            assert f"{what} {name} (paged)" in stored["figures"]
    assert "output_throughput 1x128/256" in table(compare(stored["figures"], {}))
    assert stored["decode_step_ms"].keys() == {"1 sequence", "16 of 512", "256 of 512"}
