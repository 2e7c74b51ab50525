"""The memory of a model: released while it sleeps, restored when it wakes, with the same tokens afterwards."""

import ctypes
import mmap
import sys
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from paged_backend.engine import model_memory
from paged_backend.engine.host_copy import distinct_storages, find_tensors
from paged_backend.engine.model_memory import MemoryCommand, MemoryShortage, ReleasedMemory
from paged_backend.kv import cache as kv_cache
from paged_backend.loading import model_loader
from paged_kernels.cpu import native
from tests.support.adapters import LORA, make_adapter, write_adapter_list
from tests.support.families import HYBRID_FAMILIES
from tests.support.in_process import WAIT, running, save_tiny, tiny_assembly
from tests.support.recorded_graphs import CpuCapture
from tests.support.tiny_family import HYBRID_OPTIONS, MATRIX_FAMILIES

PROMPTS = [list(range(1, 30)), [5, 6, 7], list(range(40, 57))]
MIB = 1 << 20


def generate(assembly, **sampling):
    with running(assembly) as engine:
        return engine.generate(PROMPTS, max_tokens=8, **sampling)


def resident_bytes(tensor):
    """Return the bytes of the whole pages of a tensor that are in memory."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(count * mmap.PAGESIZE), pages) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux")
def test_pool_of_a_cpu_is_given_back_to_the_system(tiny):
    assembly = tiny_assembly(tiny[0], num_gpu_blocks_override=32 * MIB // 1024, device="cpu")
    expected = generate(assembly)
    tensor, memory = assembly.runner.kv.memory, assembly.model_memory
    assert tensor.nbytes >= 4 * MIB
    assert resident_bytes(tensor) >= tensor.nbytes - MIB
    released = memory.release()
    assert released == ReleasedMemory(tensor.nbytes, weights=0, graphs=0)
    assert memory.released == released
    released_bytes = resident_bytes(tensor)  # a message with the tensor would read it
    assert released_bytes == 0
    assert memory.restore() == released
    assert resident_bytes(tensor) >= tensor.nbytes - MIB
    assert memory.released is None
    assembly.scheduler.clear_cache()
    assert generate(assembly) == expected


def as_on_gpu(monkeypatch):
    """Run without the CPU kernels, with weights and a pool that PyTorch has allocated, as on a GPU."""
    load_weights = model_loader.load_weights
    monkeypatch.setattr(native, "levels", tuple)
    monkeypatch.setattr(model_loader, "load_weights", lambda *arguments: deepcopy(load_weights(*arguments)))
    monkeypatch.setattr(kv_cache, "_zeros", lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8))


def weights_of(assembly):
    """Return the tensors that a model computes with, besides the pools."""
    runner = assembly.runner
    pools = distinct_storages([runner.kv.memory])
    pools, found = {one._cdata for one in pools}, find_tensors(assembly.loaded, runner)
    return [one for one in found if one.numel() and one.untyped_storage()._cdata not in pools]


def check_weights_move(assembly, **sampling):
    """Sleep and wake with the weights on the host. Their contents and the tokens must be those of before."""
    memory = assembly.model_memory
    memory._moves_weights = True
    with running(assembly) as engine:
        expected = engine.generate(PROMPTS, max_tokens=8, **sampling)
        weights = weights_of(assembly)
        before = [one.clone() for one in weights]
        parameters = [*assembly.loaded.model.parameters(), *assembly.loaded.model.buffers()]
        released = engine.engine.sleep_mode.sleep(WAIT).memory
        assert memory.host_bytes == released.weights >= sum(one.nbytes() for one in distinct_storages(parameters))
        left = len(distinct_storages((*weights, *parameters, assembly.runner.kv.memory)))
        assert left == 0, "memory was not freed"
        assert engine.engine.sleep_mode.wake().memory == released
        assert memory.host_bytes == 0
        assert all(map(torch.equal, weights, before))
        assert engine.generate(PROMPTS, max_tokens=8, **sampling) == expected


def test_fused_weights_move(tiny, monkeypatch):
    as_on_gpu(monkeypatch)
    check_weights_move(tiny_assembly(tiny[0], swap_space=0.001))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gemma3", "deepseek_v3", "lfm2", "qwen3_next"])
def test_weights_of_families_move(tmp_path, monkeypatch, name):
    """Experts, windows, absorbed weights of latent attention, states of recurrent layers, and tied embeddings."""
    as_on_gpu(monkeypatch)
    save_tiny(MATRIX_FAMILIES[name](), tmp_path)
    check_weights_move(tiny_assembly(tmp_path, **(HYBRID_OPTIONS if name in HYBRID_FAMILIES else {})))


def test_weights_of_a_draft_model_move(tiny, draft, monkeypatch):
    as_on_gpu(monkeypatch)
    check_weights_move(tiny_assembly(tiny[0], speculative_model=str(draft), num_speculative_tokens=2))


def test_adapter_slots_move(tiny, tmp_path, monkeypatch):
    """The adapter stays in its slot."""
    as_on_gpu(monkeypatch)
    listing = write_adapter_list(tmp_path, {"one": make_adapter(tiny[1], tmp_path / "one")})
    check_weights_move(tiny_assembly(tiny[0], adapters=listing, **LORA), lora_name="one")


def test_graphs_are_captured_again(tiny, monkeypatch):
    """A graph that was kept would use memory that has been freed."""
    capture = CpuCapture(monkeypatch)
    assembly = tiny_assembly(tiny[0])
    expected, count = generate(assembly), len(capture.replays)
    assert count
    assembly.model_memory.release()
    assert not assembly.runner.num_graphs
    assembly.model_memory.restore()
    assert assembly.runner.num_graphs
    assembly.scheduler.clear_cache()
    assert generate(assembly) == expected
    assert len(capture.replays) == 2 * count


def test_a_host_without_room_for_the_weights_changes_nothing(tiny, monkeypatch):
    as_on_gpu(monkeypatch)
    assembly = tiny_assembly(tiny[0])
    expected, memory = generate(assembly), assembly.model_memory
    memory._moves_weights = True
    with monkeypatch.context() as patch:
        patch.setattr(model_memory, "available_memory", lambda: 1000)
        with pytest.raises(MemoryShortage, match=r"need 0\.00 GiB of pinned host memory, and 0\.00 GiB are free"):
            memory.release()
        memory.run(MemoryCommand.RELEASE)  # on another rank, which rank 0 reports
    assert memory.released is None
    assert distinct_storages([assembly.runner.kv.memory])
    assert generate(assembly) == expected


def test_a_pool_that_does_not_fit_any_more_leaves_the_model_asleep(tiny, monkeypatch):
    assembly = tiny_assembly(tiny[0], device="cpu")
    expected, memory = generate(assembly), assembly.model_memory
    released = memory.release()
    with monkeypatch.context() as patch:
        patch.setattr(model_memory, "available_memory", lambda: released.total - 5)
        with pytest.raises(MemoryShortage, match=r"GiB of CPU memory, and .* GiB are free: .* GiB are missing"):
            memory.restore()
        memory.run(MemoryCommand.RESTORE)
    assert memory.released == released
    memory.run(MemoryCommand.RESTORE)
    assert memory.released is None
    assembly.scheduler.clear_cache()
    assert generate(assembly) == expected


def test_an_allocation_that_fails_leaves_the_model_asleep(tiny, monkeypatch):
    as_on_gpu(monkeypatch)
    assembly = tiny_assembly(tiny[0])
    expected, memory = generate(assembly), assembly.model_memory
    memory.release()

    def fail(storages, sizes):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model_memory, "allocate", fail)
        with pytest.raises(MemoryShortage, match="not all of it could be allocated"):
            memory.restore()
    left = len(distinct_storages([assembly.runner.kv.memory]))  # a message with the tensors would read them
    assert memory.released and left == 0
    memory.restore()
    assembly.scheduler.clear_cache()
    assert generate(assembly) == expected


def test_one_rank_without_memory_keeps_all_from_changing(tiny, monkeypatch):
    """The other ranks have less memory than this one; then one of them cannot allocate."""
    as_on_gpu(monkeypatch)
    assembly = tiny_assembly(tiny[0])
    expected, memory = generate(assembly), assembly.model_memory
    memory._moves_weights = True
    alone = memory._group
    memory._group = SimpleNamespace(all_reduce_min=lambda number: min(number, -5))
    with pytest.raises(MemoryShortage, match="pinned host memory"):
        memory.release()
    memory._group = SimpleNamespace(all_reduce_min=lambda number: number if type(number) is int else False)
    with pytest.raises(MemoryShortage, match="pinned host memory"):
        memory.release()
    assert memory.released is None
    memory._group = alone
    memory.release()
    for reduced in (lambda number: min(number, -5), lambda number: number if type(number) is int else False):
        memory._group = SimpleNamespace(all_reduce_min=reduced)
        with pytest.raises(MemoryShortage):
            memory.restore()
        left = len(distinct_storages([assembly.runner.kv.memory]))
        assert memory.released and left == 0
    memory._group = alone
    memory.restore()
    assembly.scheduler.clear_cache()
    assert generate(assembly) == expected
