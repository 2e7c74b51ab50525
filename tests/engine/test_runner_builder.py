"""Building runners: the sizes of the pools, the draft model's layers, and which graphs are captured."""

import pytest
import torch

from paged_backend.api.config import EngineConfig
from paged_backend.engine import runner_builder
from paged_backend.engine.pools import Pools, PoolSizing
from paged_backend.engine.runner_builder import build_runner, capture_graphs, graph_shapes_of
from paged_backend.execution import graphs
from tests.support.in_process import TINY, tiny_assembly

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded(tiny):
    return tiny_assembly(tiny[0], device="cpu", num_speculative_tokens=2, speculative_model=str(tiny[0])).loaded


def config_of(**options):
    return EngineConfig.from_options({"model": "x"} | TINY | {"device": "cpu"} | options)


def pools_of(loaded, *sizes):
    return Pools(PoolSizing(config_of(), loaded.cache, CPU).layout, *sizes)


def test_pools_have_the_given_sizes_and_layers_of_both_models(loaded):
    runner = build_runner(config_of(), loaded, CPU, pools_of(loaded, 5, 3))
    assert (len(runner.kv.memory), len(runner.host.memory)) == (5, 3)
    assert len(runner.kv.layers) == len(runner.host.layers) == 6
    assert len(runner.drafter.kv.layers) == 3
    assert all(
        one.keys.data_ptr() == other.keys.data_ptr()
        for one, other in zip(runner.drafter.kv.layers, runner.kv.layers[3:], strict=True)
    )
    assert build_runner(config_of(), loaded, CPU, pools_of(loaded, 5)).host is None


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_graphs_are_captured_unless_the_options_forbid_it(loaded, monkeypatch, enforce_eager):
    """The graphs are those of the model and of its draft model."""
    rows = []

    def capture(step):
        rows.append(len(step()))
        return lambda: None

    monkeypatch.setattr(runner_builder, "graph_capture", lambda device: capture)
    config = config_of(enforce_eager=enforce_eager, max_num_seqs=4)
    runner = build_runner(config, loaded, CPU, pools_of(loaded, 64))
    shapes = graph_shapes_of(config, runner)
    capture_graphs(config, loaded, runner, shapes)
    assert runner.num_graphs == (0 if enforce_eager else len(shapes))
    drafts = graphs.draft_shapes(shapes)
    assert sorted(rows) == ([] if enforce_eager else sorted(shape.logits for shape in (*shapes, *drafts)))


def test_graphs_cover_the_verification_of_draft_tokens(loaded):
    runner = build_runner(config_of(), loaded, CPU, pools_of(loaded, 5))
    shapes = {count: graph_shapes_of(config_of(num_speculative_tokens=count), runner) for count in (0, 1)}
    most = {count: graphs.without_prompts(found)[0].rows for count, found in shapes.items()}
    assert most[0] == 8
    assert most[1] >= 16
