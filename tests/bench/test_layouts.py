"""The calculated costs of dividing a model over machines."""

import pytest

from paged_bench.layouts import Shape, all_reduced, layouts
from paged_client.cli import main
from tests.support.records import records_of

SHAPE = Shape(layers=2, hidden=8, kv_width=4, vocab=32, parameters=1000)


def test_costs_are_those_counted_by_hand():
    costs = layouts(SHAPE, machines=2, rows=3, prompt=10)
    # Two machines exchange half of each sum in both phases of an all-reduce: 8 elements of 2 bytes for each row, once
    # for the embeddings and twice in each layer.
    assert all_reduced(SHAPE, rows=1, machines=2) == 16 * 5
    tensor = costs["tensor parallel"]
    assert tensor.step == 3 * 16 * 5 + 3 * 32  # the logits of half of the vocabulary, in 2 bytes
    assert (tensor.weights, tensor.messages, tensor.prompt) == (1000, 6, 10 * 16 * 5)
    pipeline = costs["pipeline parallel"]
    assert (pipeline.weights, pipeline.step, pipeline.messages, pipeline.prompt) == (1000, 3 * 16, 2, 10 * 16)
    servers = costs["prefill and decode servers"]
    assert (servers.weights, servers.step, servers.prompt) == (2000, 0, 10 * 2 * 4 * 2)
    assert costs["independent servers"].prompt == 0


def test_more_machines_move_more_with_tensor_parallelism_only():
    two, four = (layouts(SHAPE, machines, rows=1, prompt=1) for machines in (2, 4))
    assert four["tensor parallel"].step > two["tensor parallel"].step
    assert four["pipeline parallel"].step == two["pipeline parallel"].step


def test_network_time_has_bandwidth_and_latency(tmp_path):
    file = tmp_path / "figures.json"
    command = ["bench", "layouts", "--model", "tiny", "--rows", "1", "--json", str(file)]
    assert main([*command, "--gbits", "0.001", "--latency-us", "1"]) == 0
    moved = records_of(file)["moved in a decode step, tensor parallel"]["value"]
    slow = records_of(file)["network time of a decode step, tensor parallel"]["value"]
    assert slow == pytest.approx(moved * 8e3, rel=0.01)  # MB at 1 Mbit/s, in ms
    assert main([*command, "--gbits", "1000", "--latency-us", "1e6"]) == 0
    late = records_of(file)["network time of a decode step, pipeline parallel"]["value"]
    assert late == pytest.approx(2e3, rel=0.01)  # to the second machine and back
    assert file.with_suffix(".png").stat().st_size > 1000
