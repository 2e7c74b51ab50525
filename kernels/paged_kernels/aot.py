"""Ahead-of-time compilation of the Triton kernels for every supported chip, without a GPU, to read their cost.

    python -m paged_kernels.aot [--full | --sample] [--hours 0.5] [--chip sm_90 ...]

Prints one JSON object per configuration. Exits with 1 if a kernel spills more than a little or needs more shared
memory than the chip has. TRITON_INTERPRET must not be set.
"""

import argparse
import itertools
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_kernels import block_copy, kv_write, layer_ops, paged_attention, sampling, step_inputs
from paged_kernels.compilation import source_of
from paged_kernels.launch import OPTIONS, PRODUCERS, Device, Launch
from paged_kernels.launch_table import HOPPER, PRODUCER_TILES, RowTuningKey, find_table
from paged_kernels.layer_cache import FORMATS, LayerCache
from paged_kernels.packed_blocks import BLOCK_SIZE, GROUP, PackedBlocks
from paged_kernels.paging import Paging, SharedPrefixes
from paged_kernels.sampling_metadata import SamplingFilters, SamplingMetadata

KB = 1024
CHIPS = {  # chip: (target, maximum shared memory of a program)
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * KB),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * KB),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * KB),
    "sm_120": (GPUTarget("cuda", 120, 32), 99 * KB),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * KB),
}
# ptxas spills a few values that are set before a loop and read after it, to increase occupancy or because the loop
# needs all registers. In a loop over keys, a spilled value costs an instruction in every step.
MAX_SPILLED_BYTES = 128  # per thread
MAX_SPILLS_OF_STEP = 8  # loads and stores of spilled values in a loop that multiplies tiles
PRODUCTS = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_mfma|v_smfmac)[\w.:]*")


# --- cases ------------------------------------------------------------------------------------------------------------

PACKED: dict[str, Any] = dict(format="int4", block_size=BLOCK_SIZE)  # a layer with packed blocks
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SAMPLING = ("best", "greedy", "first_best", "maxima", "filter")  # the last two: both launches with filters
SMALL_KERNELS = (*SAMPLING, "block_copy", "step_inputs", "embed")  # kernels with few configurations
# Variants of attention: small tiles, small tiles with splits, large and small tiles, both with splits, shared prefixes;
# batch-invariant attention in one launch, its partitions, and their sum. On Hopper also large tiles with a producer.
INVARIANT = ("invariant", "invariant_split", "add_partitions")
PRODUCER = "producer"
ATTENTION = ("decode", "split", "prefill", "split_prefill", "prefix", *INVARIANT)
# Multi-head latent attention of DeepSeek-V3: expanded keys and values, latents, and latents on one of 8 ranks.
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
    format: str | None = None  # quantized format of the pool; int4: full blocks are packed
    # size by kind: decode, split, invariant: longest context; prefill: longest chunk; prefix: sequences; others: rows
    length: int = 1024
    width: int = 16384  # width of a row; block_copy: bytes of a block; not used by attention
    outputs: int = 1024  # outputs of a linear layer


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
    for dtype, head_dim, kernel in itertools.product(DTYPES, HEAD_DIMS, (*kernels, "pack_blocks")):
        if head_dim % GROUP == 0:
            yield Case(chip, kernel, dtype, head_dim, window=kernel != "prefix", softcap=True, sinks=True, **PACKED)
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
    yield from _producer_cases(chip)
    yield from table_grid(chip)


def _producer_cases(chip: str) -> Iterator[Case]:
    """Yield large tiles with a producer, on the chip that has them."""
    for head_dim in PRODUCER_TILES if chip == HOPPER else ():
        yield Case(chip, PRODUCER, "bf16", head_dim)
        yield Case(chip, PRODUCER, "fp16", head_dim, group=3, block_size=256, window=True, softcap=True, sinks=True)


def table_grid(chip: str) -> Iterator[Case]:
    """Yield every entry of the chip's own table, in the kernels that use it."""
    table = find_table(chip)
    for key in table.tiles if table and table.chip == chip else []:
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
    kernels = SAMPLING[:3] if key.kind == "sampling" else ("rope_kv_write",) if norm else (key.kind,)
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
    for stored in (*(dict[str, Any](format=name) for name in (None, *FORMATS.values())), PACKED):
        yield Case(chip, "split", "bf16", 256, **features, **stored)
        for kernel in ("prefill", "split_prefill"):
            yield Case(chip, kernel, "bf16", 128 if stored["format"] == "int8" else 256, **features, **stored)
        yield Case(chip, "decode", "bf16", 128, sinks=True, **stored)
        yield Case(chip, "prefix", "fp16", 64, group=3, **stored)
        yield from (Case(chip, "kv_write", dtype, **stored) for dtype in ("bf16", "fp32"))
        for head_dim, kernel in itertools.product((128, 256), ("invariant", "invariant_split")):
            yield Case(chip, kernel, "bf16", head_dim, **features, **stored)
        yield Case(chip, "add_partitions", **stored)
    yield from (Case(chip, "pack_blocks", head_dim=head_dim, **PACKED) for head_dim in (96, 256))
    expanded, latents = LATENT_SIZES[:2]
    yield from (Case(chip, kernel, **latents) for kernel in INVARIANT)
    yield from (Case(chip, "invariant", "fp32", head_dim, **features) for head_dim in (128, 256))
    for dtype, outputs, rows in itertools.product(("bf16", "fp32"), (1024, 32768), (1, 1000)):
        yield Case(chip, "invariant_linear", dtype, length=rows, width=4096, outputs=outputs)
    for name in (None, *FORMATS.values()):
        yield from (Case(chip, kernel, **latents, format=name) for kernel in ("split", "latent_kv_write"))
    yield from (Case(chip, kernel, **latents) for kernel in ("prefill", "kv_write"))
    yield from _producer_cases(chip)
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


# --- compilation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """The resources of a compiled kernel."""

    shared: int  # bytes of shared memory
    registers: int  # registers per thread
    spilled: int  # spilled bytes per thread
    products: tuple[str, ...]  # instructions that multiply tiles
    steps: tuple[int, ...]  # instructions of each innermost loop that multiplies tiles; none on AMD
    step_spills: tuple[int, ...]  # instructions of each of these loops that load or store spilled values


def _source(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """Return the source that a launch with these arguments compiles, with pointers and multiples of 16 aligned."""
    names = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    names |= {
        torch.uint8: "*u8",
        torch.int8: "*i8",
        torch.int32: "*i32",
        torch.int64: "*i64",
        int: "i32",
        float: "fp32",
    }
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if type(value).__name__ == "TensorDescriptor":
            element, block = names[value.base.dtype].removeprefix("*"), value.block_shape
            signature[parameter.name] = f"tensordesc<{element}{block},{value.layout!r}>"
            continue
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = names[value.dtype if is_tensor else type(value)]
        aligned = not parameter.do_not_specialize_on_alignment if is_tensor else value and value % 16 == 0
        if aligned and not parameter.do_not_specialize and not isinstance(value, float):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return source_of(kernel)(kernel, signature, constants, attributes)


def _launch(case: Case) -> Launch:
    """Plan the launch of a case on tensors without memory."""
    dtype, num_seqs = DTYPES[case.dtype], case.length if case.kernel == "prefix" else 8
    # The number of multiprocessors selects the plan: few give large tiles without splits, many give splits.
    device = Device(case.chip, 1 if case.kernel in ("decode", "prefill", PRODUCER, "invariant") else 1000)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    row = tensor(case.length, case.width)
    if case.kernel == "add_rms_norm":
        residual = row if case.norm else None
        return layer_ops.plan_add_rms_norm(row, row, row, residual, tensor(case.width), 1e-5, device=device)
    if case.kernel == "few_rows_linear":
        out = tensor(case.length, case.outputs)
        weight = tensor(case.outputs * (2 if case.norm else 1), case.width)
        residual, norm = (row, tensor(case.width)) if case.norm else (None, None)
        return layer_ops.plan_few_rows_linear(
            out, residual, row, residual, norm, 1e-5, weight, None, swiglu=case.norm, device=device
        )
    if case.kernel == "invariant_linear":
        out, weight = tensor(case.length, case.outputs), tensor(case.outputs, case.width)
        return layer_ops.plan_invariant_linear(out, row, weight, None, device=Device(case.chip, 132))
    if case.kernel == "swiglu":
        return layer_ops.plan_swiglu(row, tensor(case.length, 2 * case.width), device=device)
    if case.kernel == "block_copy":
        table, moves = tensor(3, 64, dtype=torch.int64), tensor(case.length, 2, dtype=torch.int64)
        return block_copy.plan_launch(moves, table, largest=case.width, aligned=16, device=device)
    if case.kernel == "step_inputs":
        tokens, integers = tensor(1, case.length, dtype=torch.int64), tensor(case.length, dtype=torch.int32)
        tables = tensor(case.length, 64, dtype=torch.int32)
        return step_inputs.plan_launch(tokens, tokens, tokens, tables, integers, integers, integers, case.block_size)
    if case.kernel == "embed":
        ids, table = tensor(case.length, dtype=torch.int64), tensor(64, 256)
        return step_inputs.plan_embed(row, tensor(case.length, 256), ids, ids, row, table, device=device)
    if case.kernel in SAMPLING:
        floats, integers = tensor(case.length, dtype=torch.float32), tensor(case.length, dtype=torch.int64)
        limits = SamplingFilters(tensor(case.length, dtype=torch.int32), floats, floats)
        filters = limits if case.kernel in ("maxima", "filter") else None
        metadata = None if case.kernel == "greedy" else SamplingMetadata(floats, integers, integers, filters)
        launches = sampling.plan_launch(row, metadata, integers, device=device)
        return launches[case.kernel in ("first_best", "filter")]
    rotates, writes = case.kernel == "rope_kv_write", case.kernel.endswith("kv_write")
    num_heads = case.width // case.head_dim
    num_kv_heads = -(-num_heads // case.group) if rotates else num_heads if writes else 2
    if case.kernel == "latent_kv_write":
        num_kv_heads = 1
    slots_of_pool = (64, num_kv_heads, case.block_size)
    is_packed = case.format == PACKED["format"]
    stored = next((stored for stored, name in FORMATS.items() if name == case.format), dtype)
    stored = torch.int8 if is_packed else stored
    value_dim = case.value_dim or case.head_dim
    keys, values = (tensor(*slots_of_pool, size, dtype=stored) for size in (case.head_dim, value_dim))
    scales = tensor(*slots_of_pool, dtype=torch.float32) if case.format else None
    cache = LayerCache.latent(keys, value_dim, scales) if case.latent else LayerCache(keys, values, scales, scales)
    if case.format and not case.latent:
        cache = replace(cache, key_channels=tensor(3, num_kv_heads, case.head_dim, dtype=torch.float32))
    cache = replace(cache, batch_invariant=case.kernel in INVARIANT)
    if is_packed:
        made = PackedBlocks.shapes(num_kv_heads, case.head_dim, value_dim)
        cache = replace(cache, packed=PackedBlocks(*(tensor(64, *shape, dtype=dtype) for shape, dtype in made)))
    slots, key = tensor(case.length, dtype=torch.int64), tensor(case.length, num_kv_heads, case.head_dim)
    if case.kernel == "kv_write":
        value = None if case.latent else tensor(case.length, num_kv_heads, value_dim)
        return kv_write.plan_kv_write(key, value, cache, slots, device=device)
    if case.kernel == "latent_kv_write":
        rope = case.head_dim - value_dim
        query, rotated = (tensor(case.length, case.group, size) for size in (3 * rope, rope))
        angles, row = tensor(case.length, rope), tensor(case.length, case.head_dim)
        return kv_write.plan_latent_kv_write(
            rotated, query, row, tensor(value_dim), 1e-6, angles, angles, cache, slots,
            from_pairs=not case.norm, to_pairs=False, device=device,
        )  # fmt: skip
    if rotates:
        query = tensor(case.length, num_heads, case.head_dim)
        angles, weight = tensor(case.length, case.head_dim), tensor(case.head_dim) if case.norm else None
        return kv_write.plan_rope_kv_write(
            query, query, key, key, angles, angles, cache, slots, weight, weight, 1e-6, device=device
        )

    def int32(*shape: int) -> torch.Tensor:
        return tensor(*shape, dtype=torch.int32)

    chunk = case.length if case.kernel in ("prefill", PRODUCER) else 32 if case.kernel == "split_prefill" else 1
    context_len = case.length if case.kernel in ("decode", "split", *INVARIANT) else 8192
    shared = SharedPrefixes(int32(num_seqs), int32(num_seqs), int32(17), 2048) if case.kernel == "prefix" else None
    paging = Paging(
        slots=tensor(num_seqs * chunk, dtype=torch.int64), block_tables=int32(num_seqs, 64),
        context_lens=int32(num_seqs), query_starts=int32(num_seqs + 1),
        max_query_len=chunk, max_context_len=context_len, shared=shared,
    )  # fmt: skip
    query = tensor(num_seqs * chunk, num_kv_heads * case.group, case.head_dim)
    out = tensor(num_seqs * chunk, num_kv_heads * case.group, value_dim)
    if is_packed:
        paging = replace(paging, packed=replace(paging, shared=None))
    launches = paged_attention.plan_launch(
        out, query, cache, paging,
        scale=0.1, sliding_window=100 if case.window else None, softcap=50.0 if case.softcap else None,
        sinks=tensor(num_kv_heads * case.group) if case.sinks else None,
        device=replace(device, features=frozenset([PRODUCERS])) if case.kernel == PRODUCER else device,
    )  # fmt: skip
    if is_packed and case.kernel != "pack_blocks":
        launches = launches[1:]  # the first one packs blocks
    return launches[case.kernel == "add_partitions"]


def _registers_on_amd(assembly: str) -> tuple[int, int]:
    """Return vector registers and scratch bytes of a thread; spilled scalar registers only move to vector ones."""
    usage = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", assembly))
    return int(usage["vgpr_count"]), int(usage["private_segment_fixed_size"])


def _read_cubin(cubin: bytes, tool: Any, option: str) -> str:
    """Return what a tool of CUDA prints about a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool.path, option, file.name], capture_output=True, text=True, check=True).stdout


def _registers_on_nvidia(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes of a thread. The kernels have no arrays, so all of the stack was spilled."""
    usage = _read_cubin(cubin, triton.knobs.nvidia.cuobjdump, "--dump-resource-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match, usage
    return int(match[1]), int(match[2])


def _steps_on_nvidia(cubin: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of instructions of each innermost loop that multiplies tiles, and how many of them load or
    store spilled values."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops: list[range] = []
    for line in _read_cubin(cubin, triton.knobs.nvidia.nvdisasm, "-c").splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*);", line):
            code.append(instruction[1])
            target = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction[1])
            if target and target[1] in labels:  # backward
                loop = range(labels[target[1]], len(code))
                if any("MMA" in code[i] for i in loop) and not any(other[0] in loop for other in loops):
                    loops.append(loop)
    spills = tuple(sum(code[i].startswith(("LDL", "STL")) for i in loop) for loop in loops)
    return tuple(len(loop) for loop in loops), spills


def compile_case(case: Case) -> Cost:
    """Compile one case. Compiler errors are not caught."""
    planned = _launch(case)
    options = {name: planned.arguments[name] for name in OPTIONS if name in planned.arguments}
    compiled = triton.compile(_source(planned.kernel, planned.arguments), target=CHIPS[case.chip][0], options=options)
    products = tuple(sorted(set(PRODUCTS.findall(compiled.asm.get("ptx") or compiled.asm["amdgcn"]))))
    if "cubin" in compiled.asm:
        registers, spilled = _registers_on_nvidia(compiled.asm["cubin"])
        steps, spills = _steps_on_nvidia(compiled.asm["cubin"])
    else:
        registers, spilled = _registers_on_amd(compiled.asm["amdgcn"])
        steps, spills = (), ()
    return Cost(compiled.metadata.shared, registers, spilled, products, steps, spills)


def fits(cost: Cost, chip: str) -> bool:
    """Return whether a kernel runs on a chip, and spills little."""
    in_loops = max(cost.step_spills, default=0)
    return cost.shared <= CHIPS[chip][1] and cost.spilled <= MAX_SPILLED_BYTES and in_loops <= MAX_SPILLS_OF_STEP


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels for every supported chip.")
    grid = parser.add_mutually_exclusive_group()
    grid.add_argument("--full", action="store_true", help="every configuration that can be launched (long)")
    grid.add_argument("--sample", action="store_true", help="one configuration of each kernel")
    longest = "time limit per chip, for configurations in random order"
    parser.add_argument("--hours", type=float, default=math.inf, help=longest)
    parser.add_argument("--chip", nargs="+", choices=CHIPS, default=list(CHIPS))
    arguments = parser.parse_args(argv)
    failures = 0
    for chip in arguments.chip:
        cases = list((full_grid if arguments.full else sample if arguments.sample else small_grid)(chip))
        if math.isfinite(arguments.hours):
            random.shuffle(cases)
        until = time.monotonic() + 3600 * arguments.hours
        for case in cases:
            if time.monotonic() > until:
                break
            cost = compile_case(case)
            runs = fits(cost, chip)
            failures += not runs
            print(json.dumps({**asdict(case), **asdict(cost), "fits": runs}), flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
