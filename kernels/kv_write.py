"""Writes a step's new keys and values into their slots of the block pool."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check_kv_write

ELEMENTS = 2048  # of one token, per program


@triton.jit(do_not_specialize_on_alignment=["slots"])
def kv_write_kernel(
    key, value, key_cache, value_cache, slots,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    STRIDE_K_BLOCK: tl.constexpr, STRIDE_K_HEAD: tl.constexpr, STRIDE_K_SLOT: tl.constexpr,
    STRIDE_V_BLOCK: tl.constexpr, STRIDE_V_HEAD: tl.constexpr, STRIDE_V_SLOT: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (num_tokens, head tiles): one program copies a tile of one token's heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < NUM_KV_HEADS) & (d < HEAD_DIM)
    k = tl.load(key + token * stride_key_token + head * stride_key_head + d, mask=mask)
    v = tl.load(value + token * stride_value_token + head * stride_value_head + d, mask=mask)
    k_row = block * STRIDE_K_BLOCK + head * STRIDE_K_HEAD + offset * STRIDE_K_SLOT
    v_row = block * STRIDE_V_BLOCK + head * STRIDE_V_HEAD + offset * STRIDE_V_SLOT
    tl.store(key_cache + k_row + d, k, mask=mask)
    tl.store(value_cache + v_row + d, v, mask=mask)


def plan_launch(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and the kernel's arguments and options by name; to launch, and to compile ahead of time."""
    num_tokens, num_kv_heads, head_dim = key.shape
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(num_kv_heads), max(1, ELEMENTS // block_d))
    arguments = dict(
        key=key, value=value, key_cache=key_cache, value_cache=value_cache, slots=slots,
        stride_key_token=key.stride(0), stride_key_head=key.stride(1),
        stride_value_token=value.stride(0), stride_value_head=value.stride(1),
        STRIDE_K_BLOCK=key_cache.stride(0), STRIDE_K_HEAD=key_cache.stride(1),
        STRIDE_K_SLOT=key_cache.stride(2),
        STRIDE_V_BLOCK=value_cache.stride(0), STRIDE_V_HEAD=value_cache.stride(1),
        STRIDE_V_SLOT=value_cache.stride(2),
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=key_cache.shape[2],
        BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return (num_tokens, triton.cdiv(num_kv_heads, block_h)), arguments


def kv_write(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # as key
    key_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], of key's type
    value_cache: Tensor,  # as key_cache
    slots: Tensor,  # [num_tokens] int64: block * block_size + offset; -1 = write nothing
) -> None:
    """Copies token t's key and value into slot slots[t] of the caches, in place."""
    check_kv_write(key, value, key_cache, value_cache, slots)
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    grid, arguments = plan_launch(key, value, key_cache, value_cache, slots)
    kv_write_kernel[grid](**arguments)


def kv_write_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """What `kv_write` means, one token at a time; for tests, not for speed."""
    check_kv_write(key, value, key_cache, value_cache, slots)
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, :, slot % block_size] = key[token]
            value_cache[slot // block_size, :, slot % block_size] = value[token]
