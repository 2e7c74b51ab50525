"""Print the output tokens per second of two streams on the CPU: `python -m tests.support.cpu_throughput MODEL`."""

import os
import statistics
import sys

from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import assemble
from paged_bench._engine import Job, run_paged

TOKENS, ROUNDS = 64, 3


def main():
    options = {"model": sys.argv[1], "device": "cpu", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 28}
    assembly = assemble(EngineConfig.from_options(options))
    jobs = [[Job(list(range(start, start + 16)), TOKENS) for start in (100 * n, 100 * n + 50)] for n in range(ROUNDS)]
    rates = [2 * TOKENS / run_paged(assembly, one).seconds for one in jobs]
    print(statistics.median(rates), flush=True)
    os._exit(0)  # without waiting for the engine's threads


if __name__ == "__main__":
    main()
