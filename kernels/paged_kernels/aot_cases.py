"""The launches that `paged_kernels.aot` compiles: kernels, types and sizes."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paged_kernels.launch_table import RowTuningKey, find_table
from paged_kernels.layer_cache import FORMATS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SAMPLING = ("threshold", "best", "greedy", "first_best")
SMALL_KERNELS = (*SAMPLING, "block_copy", "step_inputs")  # kernels with few configurations
# Variants of attention: small tiles, small tiles with splits, large and small tiles, shared prefixes; batch-invariant
# attention in one launch, its partitions, and their sum.
INVARIANT = ("invariant", "invariant_split", "add_partitions")
ATTENTION = ("decode", "split", "prefill", "prefix", *INVARIANT)
# Multi-head latent attention of DeepSeek-V3: expanded keys and values, the latents of a step, those of one rank of 8.
LATENT_SIZES: tuple[dict[str, Any], ...] = (
    dict(head_dim=192, value_dim=128, group=1),
    dict(head_dim=576, value_dim=512, group=128, latent=True),
    dict(head_dim=576, value_dim=512, group=16, latent=True),
)
HEAD_DIMS = (8, 16, 32, 64, 72, 80, 96, 112, 128, 160, 192, 256)


@dataclass(frozen=True)
class Case:
    """A launch of a kernel on a chip."""

    chip: str
    kernel: str  # name from ATTENTION or SMALL_KERNELS, or of a module
    dtype: str = "bf16"
    head_dim: int = 128
    value_dim: int | None = None  # None: head_dim
    latent: bool = False  # whether values are the first elements of keys
    group: int = 4
    block_size: int = 16
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    # rope_kv_write: RMSNorm of each head; add_rms_norm: residual; few_rows_linear: norm, residual and SwiGLU;
    # latent_kv_write: rotation of halves, otherwise of pairs
    norm: bool = False
    format: str | None = None  # quantized format of the pool
    # size by kind: decode, split, invariant: longest context; prefill: longest chunk; prefix: sequences; others: rows
    length: int = 1024
    width: int = 16384  # width of a row; block_copy: bytes of a block; not used by attention
    outputs: int = 1024  # of a linear layer


def full_grid(chip: str) -> Iterator[Case]:
    """Yield every launch shape: types, head dimensions and variants; groups and block sizes for one of each."""
    every, none = list(itertools.product((False, True), repeat=3)), [(False, False, False)]
    kernels, names = ATTENTION, (None, *FORMATS.values())
    for dtype, head_dim, kernel, name in itertools.product(DTYPES, HEAD_DIMS, kernels, names):
        attends = kernel in ("decode", "prefill", "invariant")
        variants = every if attends and name is None else [*none, (True, True, True)] if attends else none
        for window, softcap, sinks in variants:
            features = dict(window=window, softcap=softcap, sinks=sinks)
            yield Case(chip, kernel, dtype, head_dim, group=4, **features, format=name)
    for dtype, group, kernel, name in itertools.product(DTYPES, (1, 3, 8, 16, 32, 71), kernels, names):
        yield from (Case(chip, kernel, dtype, head_dim, group=group, format=name) for head_dim in (64, 128, 256))
    for dtype, kernel, name in itertools.product(DTYPES, (*kernels, "kv_write"), names):
        yield from (Case(chip, kernel, dtype, **sizes, format=name) for sizes in LATENT_SIZES)
    for dtype, sizes, name, norm in itertools.product(DTYPES, LATENT_SIZES[1:], names, (False, True)):
        yield Case(chip, "latent_kv_write", dtype, **sizes, format=name, norm=norm)
    for block_size, kernel, name in itertools.product((1, 8, 32, 64, 256), kernels, names):
        yield Case(chip, kernel, block_size=block_size, format=name)
    for dtype, head_dim in itertools.product(DTYPES, HEAD_DIMS):
        yield from (Case(chip, "kv_write", dtype, head_dim, format=name) for name in names)
        yield Case(chip, "rope_kv_write", dtype, head_dim)
        yield from (Case(chip, "rope_kv_write", dtype, head_dim, norm=True, format=name) for name in names)
    for dtype, width in itertools.product(DTYPES, (512, 4608, 8192, 16384)):
        yield from (Case(chip, "add_rms_norm", dtype, norm=norm, width=width) for norm in (False, True))
        yield Case(chip, "swiglu", dtype, width=4 * width)
        for norm, rows in itertools.product((False, True), (16, 32, 64)):
            yield Case(chip, "few_rows_linear", dtype, norm=norm, length=rows, width=width)
        for outputs, rows in itertools.product((1024, 32768), (1, 1000)):
            yield Case(chip, "invariant_linear", dtype, length=rows, width=width, outputs=outputs)
    yield from (Case(chip, kernel, dtype) for dtype, kernel in itertools.product(DTYPES, SMALL_KERNELS))
    yield from (Case(chip, "kv_write", block_size=block_size) for block_size in (1, 8, 32, 64, 256))
    yield from (Case(chip, "prefill", dtype, d, length=16) for dtype, d in itertools.product(DTYPES, (64, 128, 256)))
    yield from table_grid(chip)


def table_grid(chip: str) -> Iterator[Case]:
    """Yield every entry of the chip's own table, in the kernels that use it."""
    table = find_table(chip)
    for key, _ in table.entries() if table and table.chip == chip else []:
        if isinstance(key, RowTuningKey):
            yield from _row_cases(chip, key)
            continue
        dtype = "fp32" if key.itemsize == 4 else "bf16"
        group = 4 if key.rows == 16 else key.rows
        for name in FORMATS.values() if key.quantized else (None,):
            for kernel in ("prefill", "prefix"):
                yield Case(chip, kernel, dtype, key.block_d, group=group, format=name, length=key.length)


def _row_cases(chip: str, key: RowTuningKey) -> Iterator[Case]:
    norm = key.kind == "norm_rope_kv_write"
    kernels = SAMPLING[1:] if key.kind == "sampling" else ("rope_kv_write",) if norm else (key.kind,)
    writes = key.kind.endswith("kv_write")
    head_dims = [d for d in (64, 128, 256) if d <= key.width] if writes else [128]
    names = (None, *FORMATS.values()) if writes else (None,)
    for kernel, dtype, head_dim, name in itertools.product(kernels, ("bf16", "fp32"), head_dims, names):
        yield Case(
            chip, kernel, dtype, head_dim, norm=norm or kernel == "add_rms_norm", format=name,
            length=key.rows, width=key.width,
        )  # fmt: skip


def sample(chip: str) -> Iterator[Case]:
    """Yield a case of `small_grid` for each kernel, with the formats of the KV cache in turn."""
    by_kernel: dict[str, dict[str | None, Case]] = {}
    for case in small_grid(chip):
        by_kernel.setdefault(case.kernel, {}).setdefault(case.format, case)
    for index, formats in enumerate(by_kernel.values()):
        yield list(formats.values())[index % len(formats)]


def small_grid(chip: str) -> Iterator[Case]:
    """Yield the cases with the most registers and shared memory, and one of each variant."""
    features: dict[str, Any] = dict(window=True, softcap=True, sinks=True)
    for name in (None, *FORMATS.values()):
        yield Case(chip, "split", "bf16", 256, **features, format=name)
        yield Case(chip, "prefill", "bf16", 128 if name == "int8" else 256, **features, format=name)
        yield Case(chip, "decode", "bf16", 128, sinks=True, format=name)
        yield Case(chip, "prefix", "fp16", 64, group=3, format=name)
        yield from (Case(chip, "kv_write", dtype, format=name) for dtype in ("bf16", "fp32"))
        for head_dim, kernel in itertools.product((128, 256), ("invariant", "invariant_split")):
            yield Case(chip, kernel, "bf16", head_dim, **features, format=name)
        yield Case(chip, "add_partitions", format=name)
    expanded, latents = LATENT_SIZES[:2]
    yield from (Case(chip, kernel, **latents) for kernel in INVARIANT)
    yield from (Case(chip, "invariant", "fp32", head_dim, **features) for head_dim in (128, 256))
    for dtype, outputs, rows in itertools.product(("bf16", "fp32"), (1024, 32768), (1, 1000)):
        yield Case(chip, "invariant_linear", dtype, length=rows, width=4096, outputs=outputs)
    for name in (None, *FORMATS.values()):
        yield from (Case(chip, kernel, **latents, format=name) for kernel in ("split", "latent_kv_write"))
    yield from (Case(chip, kernel, **latents) for kernel in ("prefill", "kv_write"))
    yield Case(chip, "prefill", **expanded)
    yield Case(chip, "prefill", "bf16", 128, **features)
    yield from (Case(chip, "prefill", "fp32", 256, **features, format=name) for name in (None, "int8"))
    yield Case(chip, "split", "fp32", 256, **features)
    yield Case(chip, "prefill", "fp16", 80, group=1, block_size=1, window=True)
    yield Case(chip, "decode", "fp16", 64, group=3, block_size=128)
    yield from (Case(chip, "rope_kv_write", head_dim=head_dim, norm=True) for head_dim in (80, 256))
    yield Case(chip, "add_rms_norm", norm=True)
    yield from (Case(chip, "few_rows_linear", norm=True, length=rows, width=4096) for rows in (16, 64))
    yield Case(chip, "few_rows_linear", "fp32", norm=True, length=64, width=4096)
    yield from (Case(chip, "rope_kv_write", "fp32", 256, norm=True, format=name) for name in FORMATS.values())
    yield from (Case(chip, kernel) for kernel in ("swiglu", *SMALL_KERNELS))
