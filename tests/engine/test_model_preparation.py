"""Preparing the model: all ranks get pools of the same size, and all of them graphs or none."""

from dataclasses import dataclass

import pytest
import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.engine import runner_builder
from paged_backend.engine.model_preparation import prepare_model
from paged_kernels.launch import device_of
from tests.support.in_process import TINY


@dataclass(frozen=True, eq=False)
class GroupWithSmallerRank(ProcessGroup):
    """A group with another rank, whose numbers are smaller."""

    other: int = 0

    def all_reduce_min(self, number):
        return min(number, self.other)


def prepare(tiny, other):
    options = {"model": str(tiny[0])} | TINY | {"device": "cpu", "swap_space": 0.001}
    return prepare_model(EngineConfig.from_options(options), GroupWithSmallerRank(torch.device("cpu"), other=other))


def test_pools_have_the_size_of_the_smallest_rank(tiny):
    prepared = prepare(tiny, 7)
    assert prepared.pools.num_pages == prepared.pools.num_host_pages == 7
    assert len(prepared.runner.kv.memory) == len(prepared.runner.host.memory) == 7
    costs = prepared.costs
    assert min(costs.token, costs.copy, costs.move) > 0  # measured here, so that every rank has run these kernels


@pytest.mark.parametrize("missing", [0, 1])
def test_graphs_are_kept_only_if_all_ranks_have_the_same(tiny, monkeypatch, missing):
    """Ranks of which one replays a padded step and another runs it eagerly would exchange tensors of other sizes."""
    monkeypatch.setattr(runner_builder, "graph_capture", lambda device: lambda step: lambda: None)
    monkeypatch.setattr(
        GroupWithSmallerRank, "all_gather", lambda self, numbers: [numbers, [one - missing for one in numbers]]
    )
    assert bool(prepare(tiny, 64).runner.num_graphs) == (not missing)


def test_an_invalid_omp_num_threads_is_an_error_of_the_configuration(tiny, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "abc")
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS is 'abc'; it must be a positive integer"):
        prepare(tiny, 7)


def test_an_unknown_gpu_feature_is_an_error_of_the_configuration(tiny, monkeypatch):
    monkeypatch.setenv("PAGED_GPU_FEATURES", "fast")
    device_of.cache_clear()
    with pytest.raises(ConfigError, match="PAGED_GPU_FEATURES='fast': 'fast' is none of"):
        prepare(tiny, 7)


def test_a_kernel_cache_that_cannot_be_written_is_an_error_of_the_configuration(tiny, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file))
    options = {"model": str(tiny[0])} | TINY
    with pytest.raises(
        ConfigError, match=rf'TRITON_CACHE_DIR="{file}": cannot keep compiled kernels there: File exists'
    ):
        prepare_model(EngineConfig.from_options(options), GroupWithSmallerRank(torch.device("cuda"), other=7))
