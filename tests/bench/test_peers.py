"""Generation with transformers."""

import math

from paged_bench._peers import padded
from paged_bench._workload import Job


def test_padded_batch_is_limited_by_memory(tiny):
    jobs = [Job([1] * prompt, 4) for prompt in (5, 12, 7)]
    row = (12 + 4) * 3 * 2 * 2 * 16 * 4  # slots, layers, keys and values, heads, width, float32
    for memory, count in ((math.inf, 3), (2 * row, 2), (2 * row - 1, 1), (0, 1)):
        run = padded(tiny[1], memory)(jobs)
        assert run.requests == count
        assert run.peak_tokens == sum(len(job.prompt) + 3 for job in jobs[:count])
