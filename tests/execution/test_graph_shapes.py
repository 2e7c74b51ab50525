"""The shapes of captured steps."""

from types import SimpleNamespace

import pytest

from paged_backend.execution import graph_shapes


@pytest.mark.parametrize("queries", [1, 2, 5, 33])
@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 64), (8, 16), (64, 512), (512, 4096)])
def test_graph_shapes_cover_every_step_up_to_their_bounds(max_num_seqs, budget, queries):
    """Ordered from the largest, and each with enough padding sequences for its padding rows."""
    shapes = graph_shapes.graph_shapes(max_num_seqs, budget, queries=queries)
    assert [shape.rows for shape in shapes] == sorted((shape.rows for shape in shapes), reverse=True)
    assert len(set(shapes)) == len(shapes)
    held = SimpleNamespace(shared=None)
    for held.num_seqs in range(1, max_num_seqs + 1):
        for held.max_query_len in {1, queries}:
            rows = range(held.num_seqs, held.num_seqs * held.max_query_len + 1)
            for held.slots in map(range, rows[:: max(1, len(rows) // 7)]):
                if len(held.slots) <= min(budget, graph_shapes.MAX_ROWS):
                    assert any(shape.fits(held) for shape in shapes), held


@pytest.mark.parametrize("most", [1, 2, 5, 8, 64, 100, 256, 1000])
def test_batch_sizes_end_with_the_largest_and_limit_padding(most):
    sizes = graph_shapes.capture_batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 512)
    for count in range(1, sizes[-1] + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count < max(8, count / 8 if count > 8 else 4)
