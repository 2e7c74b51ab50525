"""Runs of a benchmark's contestants."""

from paged_bench._engine import Run


def run_of(*outputs, gap=1.0):
    return Run(
        gap,
        len(outputs),
        [[gap * (at + 1) for at in range(len(one))] for one in outputs],
        [list(one) for one in outputs],
    )
