"""The operations a model calls, by the device of its tensors. Triton is imported only where a GPU is used."""

from collections.abc import Callable
from functools import cache

from torch import Tensor

from kernels.block_pair import BlockPair
from kernels.draws import Draws
from kernels.layer_cache import LayerCache
from kernels.paging import Paging


@cache
def _paged_attention(device_type: str) -> Callable[..., Tensor]:
    if device_type == "cpu":
        from kernels.cpu.paged_attention import paged_attention as on_cpu

        return on_cpu
    from kernels.paged_attention import paged_attention as on_gpu

    return on_gpu


@cache
def _kv_write(device_type: str) -> Callable[..., None]:
    if device_type == "cpu":
        from kernels.cpu.kv_write import kv_write as on_cpu

        return on_cpu
    from kernels.kv_write import kv_write as on_gpu

    return on_gpu


@cache
def _sample(device_type: str) -> Callable[..., Tensor]:
    if device_type == "cpu":
        from kernels.cpu.sampling import sample as on_cpu

        return on_cpu
    from kernels.sampling import sample as on_gpu

    return on_gpu


@cache
def _block_copy(device_type: str) -> Callable[..., None]:
    if device_type == "cpu":
        from kernels.cpu.block_copy import block_copy as on_cpu

        return on_cpu
    from kernels.block_copy import block_copy as on_gpu

    return on_gpu


def paged_attention(
    query: Tensor,
    cache: LayerCache,
    paging: Paging,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of packed queries over their pages; see `kernels.paged_attention.paged_attention`."""
    attend = _paged_attention(query.device.type)
    return attend(
        query, cache, paging, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
    )  # fmt: skip


def kv_write(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Writes new keys and values into their slots; see `kernels.kv_write.kv_write`."""
    _kv_write(key.device.type)(key, value, cache, slots)


def sample(logits: Tensor, draws: Draws | None) -> Tensor:
    """Draws a token for every row; see `kernels.sampling.sample`."""
    return _sample(logits.device.type)(logits, draws)


def block_copy(pair: BlockPair, moves: Tensor, *, programs: int | None = None) -> None:
    """Copies whole blocks between two caches; see `kernels.block_copy.block_copy`."""
    _block_copy(pair.table.device.type)(pair, moves, programs=programs)
