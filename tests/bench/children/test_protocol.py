"""The times and tokens that a contestant in another process records."""

from paged_bench._children import protocol
from paged_bench._children.protocol import Clock


def test_tokens_are_recorded_per_sample_and_outputs_of_the_first_only(monkeypatch):
    times = iter([100.0, 104.5])  # of the start and the end
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: next(times))
    clock = Clock([{"n": 2, "arrival": 1.0}, {"n": 1, "arrival": 3.0}])
    clock.tokens(0, 0, [5], when=2.0)
    clock.tokens(0, 1, [6, 7], when=2.5)
    clock.tokens(1, 0, [8], when=3.5)
    clock.tokens(0, 0, [9], when=4.0)
    result = clock.result()
    assert result["stamps"] == [[1.0, 3.0], [1.5, 1.5], [0.5]]
    assert result["outputs"] == [[5, 9], [8]]
    assert result["seconds"] == 4.5
