"""What a GPU's memory is thought to have room for, with figures in the place of a GPU."""

from types import SimpleNamespace

import pytest
import torch

from paged_backend import graphs, warm_up
from paged_backend.config import EngineConfig

LARGEST, EACH, WORKSPACE, CACHED = 900, 7, 32, 5000  # bytes


class Memory:
    """Of a GPU whose allocator keeps what was freed until it is told, as recording a CUDA graph does."""

    def __init__(self):
        self.cached, self.for_good, self.recorded = CACHED, 0, 0

    def record(self, config, loaded, runner, batch_sizes):
        self.cached = 100  # given back, and something new
        self.for_good = WORKSPACE
        self.recorded = LARGEST + EACH * (len(graphs.kinds(batch_sizes, runner.shares)) - 1)

    def forget(self):
        self.recorded = 0

    def empty(self):
        self.cached = 0

    def free(self, device):
        return 10**6 - self.cached - self.for_good - self.recorded, 10**6


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 64, 100])
def test_the_memory_of_recorded_steps_is_foreseen(monkeypatch, max_num_seqs, shares):
    memory = Memory()
    monkeypatch.setattr(warm_up, "record", memory.record)
    monkeypatch.setattr(torch.cuda, "empty_cache", memory.empty)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory.free)
    runner = SimpleNamespace(kv=SimpleNamespace(device=torch.device("cuda")), shares=shares, forget=memory.forget)
    config = EngineConfig.from_options({"model": "x", "max_num_seqs": max_num_seqs})
    foreseen = warm_up.graph_bytes(config, None, runner)
    count = len(graphs.kinds(graphs.sizes(max_num_seqs), shares))
    assert foreseen == LARGEST + EACH * (count - 1)
