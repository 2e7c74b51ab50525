"""The report of reached and missed targets."""

from paged_bench._cpu_report import target_report
from paged_bench._report import Record


def test_target_report():
    lines = list(
        target_report(
            [
                Record("a step", 35.0, "ms", 28.0),
                Record("another", 14.0, "ms", 28.0),
                Record("a ratio", 1.17, "x", 1.3),
                Record("a peer", None, "not measured: no wheel", 2.0),
                Record("no target", 1.0, "x"),
            ]
        )
    )
    assert [line[:16].strip() for line in lines] == ["missed by 25%", "reached", "missed by 10%", "not measured"]
    assert "no wheel" in lines[3]
