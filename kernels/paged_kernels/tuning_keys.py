"""The points that the tuner times: those of models of all sizes, or those of one model, the most valuable first."""

import itertools
from typing import Any

import torch

from paged_kernels.attention_plan import padded_head_dim, rows_of_query
from paged_kernels.launch_table import (
    ROW_BUCKETS,
    ROW_COUNT_INVARIANT,
    AnyKey,
    RowTuningKey,
    TuningKey,
    power_of_two,
)

LENGTHS = (4096, 512, 64)  # tokens of the longest chunk
BLOCK_SIZE = 16  # the engine's default
WIDTHS = {  # widths of rows, rounded up to a power of two, in models of 0.5B to 70B; an 8B model's come first
    "rope_kv_write": (4096, 1024, 2048, 8192),
    "norm_rope_kv_write": (4096, 1024, 2048, 8192),
    "add_rms_norm": (4096, 1024, 2048, 8192),
    "swiglu": (16384, 4096, 8192, 32768),
    "sampling": (131072, 32768, 65536, 262144),
    "kv_write": (1024, 256, 512),
    "block_copy": (32768, 8192, 16384),
}
# Kernels of a layer besides attention, by model_type; models of other types launch only kv_write. The few dense layers
# of a mixture of experts are not counted.
FUSED = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), ("rope_kv_write", "add_rms_norm", "swiglu")),
    # DeepSeek's latent_kv_write has the tile of rope_kv_write, with the rotated elements of a head as its size.
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "mixtral", "gpt_oss"), ("rope_kv_write", "add_rms_norm")),
    "qwen3": ("norm_rope_kv_write", "add_rms_norm", "swiglu"),
    "qwen3_moe": ("norm_rope_kv_write", "add_rms_norm"),
    "smollm3": ("rope_kv_write", "add_rms_norm", "swiglu", "kv_write"),
}


def _row_keys(kind: str, width: int) -> list[AnyKey]:
    """Return the keys of a row-wise kernel for every number of rows, decode steps of many sequences first."""
    few, some, many = ROW_BUCKETS
    return [RowTuningKey(kind, width, rows) for rows in ((many,) if kind in ROW_COUNT_INVARIANT else (some, many, few))]


def tuning_keys(*, quick: bool) -> list[AnyKey]:
    """Return the keys for models of all sizes, those of an 8B model first. quick: one key of each kernel."""
    if quick:
        first = [RowTuningKey(kind, widths[0], ROW_BUCKETS[-1]) for kind, widths in WIDTHS.items()]
        return [TuningKey(128, 2, 16, False, LENGTHS[1]), *first]
    attention: list[AnyKey] = [
        TuningKey(block_d, 2, count, quantized, length)
        for quantized, block_d, count, length in itertools.product((False, True), (128, 64, 256), (16, 32, 64), LENGTHS)
    ]
    rows = [
        key
        for position in range(max(map(len, WIDTHS.values())))
        for kind, widths in WIDTHS.items()
        for width in widths[position : position + 1]
        for key in _row_keys(kind, width)
    ]
    return [*attention[: len(LENGTHS)], *rows, *attention[len(LENGTHS) :]]


def model_keys(config: Any, *, dtype: torch.dtype, kv_dtype: torch.dtype) -> list[AnyKey]:
    """Return the keys of the launches of one model, on one GPU.

    config: a `PretrainedConfig` of transformers. Raises ValueError for a size that it lacks.
    """
    config = config.get_text_config()
    heads, vocab = _size(config, "num_attention_heads"), _size(config, "vocab_size")
    num_kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or _size(config, "hidden_size") // heads
    quantized, padded = kv_dtype.itemsize == 1, power_of_two(head_dim)
    layer = FUSED.get(config.model_type, ("kv_write",))
    widths = {"sampling": vocab, "block_copy": num_kv_heads * BLOCK_SIZE * head_dim * kv_dtype.itemsize}
    for kind in layer:
        if kind == "add_rms_norm":
            widths[kind] = _size(config, "hidden_size")
        elif kind == "swiglu":
            widths[kind] = _size(config, "intermediate_size")
        else:
            widths[kind] = power_of_two(num_kv_heads if kind == "kv_write" else heads) * padded
    block_d = padded_head_dim(head_dim)
    rows = rows_of_query(heads // num_kv_heads, dtype.itemsize, block_d)
    return [
        *(TuningKey(block_d, dtype.itemsize, rows, quantized, length) for length in LENGTHS),
        *(key for kind in (*layer, "sampling", "block_copy") for key in _row_keys(kind, power_of_two(widths[kind]))),
    ]


def _size(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: must be a positive integer")
    return value
