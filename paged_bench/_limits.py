"""The limits of the machine, and the share of them that an engine reaches.

A decode step has to read its weights, keys and values: the memory bandwidth limits it. A prompt has to be multiplied by
all weights: the multiply rate limits it. On a CPU, both are measured by loops that do nothing else (peak.cpp), with the
instructions of the level in use.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from paged_backend.engine.assembly import Assembly
from paged_backend.kv.cache import bytes_per_token
from paged_backend.models.decoder import FusedDecoder
from paged_backend.models.linear import GroupedCopy, JoinedWeight, PermutedWeight, Weight
from paged_bench._engine import Job
from paged_bench._harness import Bars, Record, alternate, not_measured
from paged_bench._timing import Call, cache_bytes, timer
from paged_kernels.cpu import native
from paged_kernels.cpu.build import FLAGS, LEVELS, BuildFailed, find_compiler, run_compiler
from paged_kernels.cpu.huge_pages import request_huge_pages

SOURCE = Path(__file__).parent / "peak.cpp"
FACTORS = (torch.float32, torch.bfloat16, torch.int8)  # types that are multiplied
ALIGNMENT = 1024  # bytes; `read_memory` takes multiples
ROUNDS = {"read": 7, "multiply": 50}  # of which the fastest counts
READ, MULTIPLY = "memory bandwidth", "multiply rate"  # names of the limits in records


@dataclass(frozen=True)
class Machine:
    """The measured limits of the device."""

    device: torch.device
    read: float  # bytes/s
    flops: Mapping[torch.dtype, float]  # operations/s, by the type that is multiplied

    def records(self, others: Mapping[str, Machine]) -> Iterator[Record]:
        """Yield the limits, beside other ones."""
        yield Record(READ, self.read / 1e9, "GB/s", peers={name: one.read / 1e9 for name, one in others.items()})
        for dtype, flops in self.flops.items():
            peers = {name: one.flops[dtype] / 1e9 for name, one in others.items()}
            yield Record(f"{MULTIPLY}, {_name(dtype)}", flops / 1e9, "GFLOP/s", peers=peers)


Limits = tuple[Machine | None, Sequence[Record]]  # None if they cannot be measured, and the records say why


# --- measurement ------------------------------------------------------------------------------------------------------


def gpu_limits(device: torch.device, dtype: torch.dtype, quick: bool) -> Limits:
    """Measure the faster of two reductions over more memory than the caches hold, and a square matrix product."""
    nbytes = max(4 * cache_bytes(device), 1 << 30) >> (2 if quick else 0)
    memory, size = torch.ones(nbytes // 4, device=device), 8192 >> (1 if quick else 0)
    left, right = torch.randn(2, size, size, device=device, dtype=dtype).unbind()
    calls: dict[str, Call] = {
        "sum": lambda _: memory.sum(),
        "largest": lambda _: memory.amax(),
        "product": lambda _: left @ right,
    }
    best = alternate({name: timer(call, 1, device) for name, call in calls.items()}, 5, quiet=True).medians
    flops = {dtype: 2 * size**3 / best["product"]}
    machine = Machine(device, memory.nbytes / min(best["sum"], best["largest"]), flops)
    return machine, list(machine.records({}))


def cpu_limits(threads: int) -> Limits:
    """Measure the limits of this number of threads, and of one. Needs a compiler."""
    try:
        library = _compile()
    except BuildFailed as error:
        return None, [not_measured(name, str(error)) for name in (READ, MULTIPLY)]
    machine = _measure_cpu(library, threads)
    return machine, list(machine.records({"1 thread": _measure_cpu(library, 1)}))


def _measure_cpu(library: ctypes.CDLL, threads: int) -> Machine:
    """Measure the limits. A type without faster instructions than float32 has the rate of float32."""
    device = torch.device("cpu")
    memory = torch.empty(max(4 * cache_bytes(device), 128 << 20), dtype=torch.uint8)
    request_huge_pages(memory)
    memory.fill_(1)
    part = len(memory) // threads // ALIGNMENT * ALIGNMENT
    reads = [partial(library.read_memory, memory.data_ptr() + thread * part, part) for thread in range(threads)]
    flops: dict[torch.dtype, float] = {}
    with ThreadPoolExecutor(threads) as pool:

        def seconds(calls: Sequence[Callable[[], object]], rounds: int) -> float:
            times = []
            for _ in range(rounds):
                started = time.perf_counter()
                list(pool.map(lambda call: call(), calls))
                times.append(time.perf_counter() - started)
            return min(times)

        for dtype in FACTORS:
            multiply = getattr(library, f"multiply_{_name(dtype)}", None)
            rate = threads * multiply() / seconds([multiply] * threads, ROUNDS["multiply"]) if multiply else 0.0
            flops[dtype] = max(rate, flops.get(torch.float32, 0.0))
        return Machine(device, threads * part / seconds(reads, ROUNDS["read"]), flops)


def _compile() -> ctypes.CDLL:
    """Compile and load peak.cpp for the level in use. Raises BuildFailed."""
    level = native.level() if native.levels() else "plain"
    flags = [flag for flag in FLAGS if flag != "-ffp-contract=off"]  # a product and a sum are one instruction
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/peak.so"
        run_compiler([find_compiler(), *flags, *LEVELS[level].split(), "-shared", str(SOURCE), "-o", target])
        library = ctypes.CDLL(target)
    library.read_memory.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    for dtype in FACTORS:
        if multiply := getattr(library, f"multiply_{_name(dtype)}", None):
            multiply.restype = ctypes.c_int64
    return library


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- the work of a model ----------------------------------------------------------------------------------------------


def step_bytes(assembly: Assembly, jobs: Sequence[Job]) -> dict[str, int]:
    """Return the bytes that a decode step in the middle of the outputs reads.

    The input embedding does not count: a step reads only one row for each token.
    """
    model, spec = assembly.loaded.model, assembly.loaded.spec
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    excluded = {id(module.weight) for module in (*linears, model.get_input_embeddings())}
    weights = sum(map(_nbytes, _weights(assembly)))
    weights += sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in excluded)
    tokens = sum(len(job.prompt) + job.output // 2 for job in jobs)
    kv_bytes = tokens * bytes_per_token(assembly.loaded.layers, spec.kv_dtype)
    return {"weights": weights, "keys and values": kv_bytes}


def prompt_flops(assembly: Assembly, length: int) -> int:
    """Return the operations of a prompt: products of linear layers for all tokens, except for the output layer, and of
    queries with keys and values. Experts do not count."""
    model = assembly.loaded.model
    output, heads = model.get_output_embeddings(), model.config.get_text_config().num_attention_heads
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not output]
    products = length * sum(module.in_features * module.out_features for module in linears)
    for layer in assembly.loaded.spec.layers:
        pairs = sum(min(context, layer.window or context) for context in range(1, length + 1))
        products += heads * (layer.head_dim + (layer.value_dim or layer.head_dim)) * pairs
    return 2 * products


def factor_type(assembly: Assembly) -> torch.dtype:
    """Return the type in which linear layers multiply: int8 if they round activations to 8 bits."""
    rounds = any(weight.packed.int8_rows for weight in _weights(assembly) if isinstance(weight, GroupedCopy))
    return torch.int8 if rounds else assembly.loaded.spec.dtype


def _weights(assembly: Assembly) -> Iterator[Weight]:
    """Yield the weights of all linear layers, inside and outside of fused layers."""
    model = assembly.loaded.model
    fused = set[nn.Module]()
    if decoder := FusedDecoder.of(model):
        yield from (projection.weight for layer in decoder.layers for projection in layer.projections)
        called = {part for module in decoder.called_modules for part in module.modules()}
        fused = set(decoder.module.modules()) - called
    for module in model.modules():
        if isinstance(module, nn.Linear) and module not in fused:
            forward = vars(module).get("forward")
            yield forward.keywords["weight"] if isinstance(forward, partial) else module.weight


def _nbytes(weight: Weight) -> int:
    if isinstance(weight, JoinedWeight):
        return sum(map(_nbytes, weight.parts))
    if isinstance(weight, PermutedWeight):
        return _nbytes(weight.weight)
    if isinstance(weight, GroupedCopy):
        return weight.packed.groups.nbytes
    assert isinstance(weight, torch.Tensor), weight
    return weight.nbytes


# --- shares -----------------------------------------------------------------------------------------------------------


def read_shares(name: str, bytes_per_second: Mapping[str, float], on: Machine | None) -> Record:
    """Return the share of the memory bandwidth that contestants use, the first of which is ours."""
    return _shares(f"{name}: share of the {READ}", bytes_per_second, on.read if on else None)


def multiply_shares(name: str, flops: Mapping[str, float], dtype: torch.dtype, on: Machine | None) -> Record:
    """Return the share of the multiply rate of a type that contestants reach, the first of which is ours."""
    return _shares(f"{name}: share of the {MULTIPLY}", flops, on.flops[dtype] if on else None)


def _shares(name: str, rates: Mapping[str, float], limit: float | None) -> Record:
    if limit is None:
        return not_measured(name, f"the {name.partition(' of the ')[2]} is not known")
    ours, *others = (100 * rate / limit for rate in rates.values())
    return Record(name, ours, "%", limit=100.0, peers=dict(zip(list(rates)[1:], others, strict=True)))


def share_panel(records: Sequence[Record]) -> Iterator[Bars]:
    """Yield the shares of all contestants."""
    bars: dict[str, float] = {}
    for record in records:
        if record.unit == "%" and record.value is not None and ": share of the " in record.name:
            bars |= {record.name: record.value} | {
                f"{record.name}, {who}": share for who, share in record.peers.items()
            }
    if bars:
        ours = {record.name for record in records}
        yield Bars("share of the machine's limit, %; grey: other engines", bars, grey=bars.keys() - ours, line=100.0)
