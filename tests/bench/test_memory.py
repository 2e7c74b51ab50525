"""The benchmark of memory: wasted slots, sharing, and layers that keep less than all keys and values."""

from dataclasses import replace

import pytest
import torch

from paged_backend.api.block_layout import BlockLayout
from paged_backend.engine.block_size import LENGTHS
from paged_backend.kv.cache import CacheLayout, LayerShape
from paged_bench import memory
from paged_bench.memory import CONTIGUOUS, MODELS, RESERVATION, Sample, requests, simulate, utilisation
from paged_client.cli import main
from tests.support.records import records_of

# --- pool simulation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"n": 2}])
def test_allocated_slots_are_those_computed_from_the_lengths(sampling):
    samples = list(simulate(requests("ShareGPT", 120, sampling, equal=True), block_size=16))
    assert samples
    for one in samples:
        assert one.live <= one.allocated <= one.unshared
        assert one.oracle <= one.power_of_two <= one.maximum
        assert one.maximum == RESERVATION * one.requests * sampling.get("n", 1)
    assert utilisation(samples, "allocated") == pytest.approx(utilisation(samples, "analytic"), rel=0.02)


def test_utilisation_weighs_samples_by_their_slots():
    small = Sample(1, live=10, allocated=10, unshared=0, analytic=0, maximum=0, power_of_two=0, oracle=0)
    assert utilisation([small, replace(small, live=10, allocated=90)], "allocated") == 0.2


def test_block_sizes_are_compared_with_these_lengths():
    """Of sequences while they run: each has had every length from its prompt to its end for one step."""
    spans = [(len(one.prompt_token_ids), one.sampling.max_tokens) for one in requests("ShareGPT", 2000)]
    running = sorted(length for prompt, output in spans for length in range(prompt + 1, prompt + output + 1))
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        found, assumed = (lengths[int(share * len(lengths))] for lengths in (running, LENGTHS))
        assert assumed == pytest.approx(found, rel=0.12)


@pytest.mark.parametrize(("kind", "requested"), [("windowed", 300), ("hybrid", 60)])
def test_more_requests_run_at_once_if_layers_keep_less(kind, requested, monkeypatch):
    """In the same bytes. Contiguous memory keeps neither checkpoints nor anything for the prefix cache."""
    monkeypatch.setattr(memory, "KINDS", {kind: memory.KINDS[kind]})
    (record,) = memory.concurrency(requested, (1,))
    assert record.name.startswith(f"requests at once, {kind}: ")
    assert record.peers["contiguous"] == CONTIGUOUS
    if kind == "windowed":
        assert record.value > 1.5 * record.peers["one kind of page"] > 6 * CONTIGUOUS
    else:
        assert record.value >= record.peers["one kind of page"] > CONTIGUOUS / 2


def test_requests_at_once_are_limited_by_pages_and_by_reserved_states():
    assert memory.mean_running(60, 1, 32, BlockLayout(16), 60) == 0  # the longest request does not fit
    layout = CacheLayout.of([LayerShape(1, 64)], 16, torch.bfloat16)
    states = 100 * layout.page_bytes  # of a sequence, whose tokens take about 29 pages
    assert 6 < memory.most_requests(60, 1, 10 * states, lambda number: (layout, number * states)) < 9


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_memory_benchmark(tiny, tmp_path):
    file = tmp_path / "figures.json"
    assert main(["bench", "memory", "--model", str(tiny[0]), "--quick", "--json", str(file)]) == 0
    records = records_of(file)
    waste = [records[f"waste ShareGPT block_size={size}"]["value"] for size in (1, 4, 16, 64, 256)]
    assert waste[0] == 0
    assert waste == sorted(waste)
    assert records["waste ShareGPT block_size=16"]["peers"]["contiguous, oracle"] > waste[2]
    for model in MODELS:
        for length in ("8,192", "32,768"):
            held = records[f"memory, {model.name}, {length} tokens"]
            assert 1 <= held["value"] <= held["target"] < held["peers"]["all kept"]
            assert held["peers"].get("with a checkpoint", 2) > held["value"]
            fits = records[f"requests in 64 GiB, {model.name}, {length} tokens"]
            assert fits["value"] > fits["peers"]["all kept"]
    for kind, model in memory.KINDS.items():
        at_once = records[f"requests at once, {kind}: {model.name}, ShareGPT"]
        assert at_once["value"] > 0.9 * at_once["peers"]["one kind of page"]
    for n in (2, 4):
        saved = records[f"saved by sharing ShareGPT n={n}"]
        assert abs(saved["value"] - saved["peers"]["by arithmetic"]) < 1
