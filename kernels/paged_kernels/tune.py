"""The tuner: times launch shapes of the kernels on this GPU, and writes the table from which launches take them.

    python -m paged_kernels.tune [--model NAME_OR_PATH] [--table FILE] [--fresh]

Candidates are compiled in parallel processes, while the candidates of the previous point are timed. They are timed one
after the other, each as a CUDA graph that replays a call. Chunks attend to shuffled blocks, in enough pools to exceed
the L2 cache. For any other kernel, the rows are in the cache, as if the previous launch of a step had written them.
Candidates that do not compile, take much longer to compile than others, spill, or differ from the reference are
skipped.

The table is written after each point. Points that it already has from this GPU, with the same software, are not
repeated, so an interrupted run can be continued. Exits with 2 without a GPU.
"""

import argparse
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import torch

from paged_kernels import launch, launch_table
from paged_kernels.attention_plan import padded_head_dim, rows_of_query
from paged_kernels.compilation import FAILED, Compiler, missing_variants
from paged_kernels.launch import Launch
from paged_kernels.launch_table import (
    CONFIGS,
    MAX_STAGED,
    ROW_BUCKETS,
    ROW_COUNT_INVARIANT,
    AnyKey,
    AnyTile,
    Measurement,
    RowTile,
    RowTuningKey,
    Table,
    Tile,
    TuningKey,
    default_row_tile,
    power_of_two,
    staged_bytes,
)
from paged_kernels.tuning_inputs import BLOCK_SIZE, Problem, make_problem

SPILLS, WRONG = "spilling", "wrong"
MAX_SPILLS = 16  # values of 4 bytes: some are set before a loop, which does not use them
DTYPES = ("bfloat16", "float16", "float32")
KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}

Result = float | str  # microseconds of a call, or why there are none
# Begins to compile the candidates for a key. They are timed while the returned iterator is read.
Start = Callable[[AnyKey], Iterator[tuple[AnyTile, Result]]]
# Begins to compile launches. The result is None, or why they cannot run.
CompileAhead = Callable[[Sequence[Launch]], "Future[str | None]"]


class Show(Protocol):
    """Shows a line of progress. The next line replaces it unless it is `done`."""

    def __call__(self, line: str, *, done: bool = False) -> None: ...


# --- the points that are timed, and their candidates ------------------------------------------------------------------

LENGTHS = (4096, 512, 64)  # tokens of the longest chunk
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
    """Return the keys for models of all sizes, an 8B model's first. quick: one key of each kernel."""
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


def candidates(key: AnyKey) -> Iterator[AnyTile]:
    """Yield the tiles to time, including the default of every chip. The compiler decides which of them fit a chip."""
    yield from _row_candidates(key) if isinstance(key, RowTuningKey) else _attention_candidates(key)


def _row_candidates(key: RowTuningKey) -> Iterator[RowTile]:
    yield default_row_tile(key)
    whole_row, unit = key.kind == "add_rms_norm", 4 if key.kind == "block_copy" else 1
    per_thread = (4, 8, 16, 32, 64, 128) if whole_row else (4, 8, 16, 32)
    for count, num_warps in itertools.product(per_thread, (1, 2, 4, 8, 16)):
        elements = 32 * num_warps * count * unit
        if elements == key.width or (elements < key.width and not whole_row):
            yield RowTile(elements, num_warps)


def _attention_candidates(key: TuningKey) -> Iterator[Tile]:
    block_ms, block_ns = [64, 128], [32, 64, 128]
    if key.itemsize == 4:  # multiplied in registers
        block_ms, block_ns = [16, 32], [16, 32, 64]
    elif key.quantized and key.block_d > 128:
        block_ns.insert(0, 16)
    for block_m, block_n, num_warps, num_stages in itertools.product(block_ms, block_ns, (4, 8), (1, 2, 3, 4)):
        if block_m * block_n * num_stages * key.block_d <= 128 * 128 * 3 * 128:
            yield Tile(max(block_m, key.rows), block_n, num_warps, num_stages)
    if key.can_have_producer:
        for block_n, num_stages in itertools.product((64, 128), (2, 3, 4, 6)):
            tile = Tile(128, block_n, 4, num_stages, producer=True)
            if staged_bytes(key.block_d, tile) <= MAX_STAGED:
                yield tile


# --- timing -----------------------------------------------------------------------------------------------------------


def tune(
    chip: str,
    keys: Sequence[AnyKey],
    start: Start,
    *,
    file: Path,
    measured: Measurement,
    fresh: bool = False,
    show: Show,
) -> Table:
    """Time the candidates for each key, and write the fastest into the table.

    The table is written after each key. Entries for other keys stay. Keys whose entries were timed on the same GPU with
    the same software are left out, except for a fresh run; the times of other GPUs and software are removed.
    """
    table = launch_table.read_table(file) if file.exists() else Table(chip, {})
    tiles, times, old = dict(table.tiles), dict(table.times), table.measured
    if old is None or (old.gpu, old.software) != (measured.gpu, measured.software):
        times = {}
    for key in keys if fresh else ():
        times.pop(key, None)
    left = [key for key in keys if key not in times]
    if len(left) < len(keys):
        show(f"{len(keys) - len(left)} of {len(keys)} points are in the table already", done=True)
    for index, (key, results) in enumerate(_started(left, start), len(keys) - len(left) + 1):
        title = f"[{index}/{len(keys)}] {key}"
        show(f"{title}: compiling")
        timed: dict[AnyTile, float] = {}
        skipped: Counter[str] = Counter()
        for tile, result in results:
            if isinstance(result, str):
                skipped[result] += 1
            else:
                timed[tile] = result
            show(f"{title}: {len(timed)} timed, {skipped.total()} skipped")
        reasons = "".join(f", {count} {reason}" for reason, count in skipped.items())
        if not timed:
            show(f"{title}: no candidate runs{reasons}", done=True)
            continue
        best = min(timed, key=lambda tile: timed[tile])
        tiles[key] = best
        times[key] = round(timed[best], 2)
        table = Table(chip, dict(tiles), measured, dict(times))
        launch_table.write_table(table, file)
        show(f"{title}: {times[key]} us with {best}, {len(timed)} timed{reasons}", done=True)
    return table


def _started(keys: Sequence[AnyKey], start: Start) -> Iterator[tuple[AnyKey, Iterator[tuple[AnyTile, Result]]]]:
    """Yield each key with its results, after the candidates for the next one have begun to compile."""
    following = [start(key) for key in keys[:1]]
    for key, after in itertools.zip_longest(keys, keys[1:]):
        results = following.pop()
        if after is not None:
            following.append(start(after))
        yield key, results


def start_with(
    timer: Callable[[Callable[[], None]], float], compile_ahead: CompileAhead, device: torch.device, **options: Any
) -> Start:
    """Return a function that compiles and times all candidates for a key.

    timer: returns the microseconds of a function. options: keyword arguments of `make_problem`.
    """

    def start(key: AnyKey) -> Iterator[tuple[AnyTile, Result]]:
        problem = make_problem(key, device, **options)
        compiling: dict[Future[str | None], list[AnyTile]] = {}
        seen = set()
        for tile in candidates(key):
            planned = _plan(problem, key, tile, device)
            if (arguments := _without_tensors(planned)) not in seen:  # else it is the same launch as for another tile
                seen.add(arguments)
                compiling.setdefault(compile_ahead(planned), []).append(tile)
        return _results(problem, key, compiling, timer, device)

    return start


def _plan(problem: Problem, key: AnyKey, tile: AnyTile, device: torch.device) -> list[Launch]:
    """Return the launches over the first copy of the inputs, and use the tile for all later ones."""
    launch_table.use_table(Table(launch.device_of(device).chip, {key: tile}))
    return problem.plans[0]()


def _without_tensors(launches: Sequence[Launch]) -> tuple[Any, ...]:
    """Return what distinguishes launches over the same inputs."""

    def plain(value: Any) -> Any:  # of a descriptor of a tensor, the shape that is copied at a time
        return None if isinstance(value, torch.Tensor) else tuple(getattr(value, "block_shape", ())) or value

    return tuple(
        (planned.grid, tuple((name, plain(value)) for name, value in planned.arguments.items())) for planned in launches
    )


def _results(
    problem: Problem,
    key: AnyKey,
    compiling: dict["Future[str | None]", list[AnyTile]],
    timer: Callable[[Callable[[], None]], float],
    device: torch.device,
) -> Iterator[tuple[AnyTile, Result]]:
    """Time each tile when it is compiled."""
    for future in as_completed(compiling):
        for tile in compiling[future]:
            yield tile, future.result() or _time(problem, key, tile, timer, device)


def _time(
    problem: Problem,
    key: AnyKey,
    tile: AnyTile,
    timer: Callable[[Callable[[], None]], float],
    device: torch.device,
) -> Result:
    """Time all launches of a call with one tile."""
    import triton

    launches = _plan(problem, key, tile, device)
    for output in problem.outputs:
        output.zero_()
    try:
        if any(getattr(planned.run(), "n_spills", 0) > MAX_SPILLS for planned in launches):
            return SPILLS
        if not problem.is_correct():
            return WRONG

        def run() -> None:
            for plan in problem.plans:
                for planned in plan():
                    planned.run()

        return timer(run) / len(problem.plans)
    except (triton.CompilationError, triton.OutOfResources, RuntimeError):  # e.g. too much shared memory
        if device.type == "cuda":
            torch.cuda.synchronize()  # raises if a kernel failed, as all later launches would
        return FAILED


# --- the command ------------------------------------------------------------------------------------------------------


def graph_time(run: Callable[[], None]) -> float:
    """Return the microseconds of a function on a GPU, from replays of a CUDA graph."""
    import triton

    milliseconds: float = triton.testing.do_bench_cudagraph(run, rep=5, return_mode="median")
    return milliseconds * 1000


def print_progress(line: str, *, done: bool = False) -> None:
    """Print progress on one line of a terminal; elsewhere, print only lines that are `done`."""
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="\n" if done else "", flush=True)
    elif done:
        print(line, flush=True)


def read_config(name: str) -> Any:
    """Return the configuration of a model in a directory or on the Hugging Face hub. Raises ValueError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # e.g. no network, unknown name, invalid JSON; the types differ
        raise ValueError(f"model={name!r}: {str(error).strip().partition(chr(10))[0]}") from error


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time launch shapes and write this chip's table.")
    points = parser.add_mutually_exclusive_group()
    points.add_argument("--model", metavar="NAME_OR_PATH", help="only the points of this model; reads its config.json")
    points.add_argument("--quick", action="store_true", help="only one point of each kernel")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="default: the model's, or bfloat16")
    cache = "of the model's KV cache, default: dtype; without --model of the quantized points, default: fp8"
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="auto", help=cache)
    parser.add_argument("--table", type=Path, metavar="FILE", help="in place of the chip's file in configs")
    parser.add_argument("--fresh", action="store_true", help="time points again that the table already has")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--processes", type=int, default=max(1, cores * 3 // 4), help="that compile; default: 3 for 4 cores"
    )
    arguments = parser.parse_args(argv)
    if arguments.processes < 1:
        parser.error(f"--processes={arguments.processes}: must be at least 1")
    return arguments


def points_of(arguments: argparse.Namespace) -> tuple[list[AnyKey], dict[str, torch.dtype]]:
    """Return the keys to time, and the keyword arguments of `make_problem`. Raises ValueError."""
    dtype, kv_dtype = getattr(torch, arguments.dtype, None), KV_DTYPES[arguments.kv_cache_dtype]
    options = {"quantized_dtype": kv_dtype} if kv_dtype else {}
    if arguments.model is None:
        if dtype == torch.float32:
            raise ValueError("dtype='float32': must be bfloat16 or float16 without a model")
        return tuning_keys(quick=arguments.quick), {"dtype": dtype or torch.bfloat16, **options}
    config = read_config(arguments.model)
    dtype = dtype or config.get_text_config().dtype or torch.float32
    return model_keys(config, dtype=dtype, kv_dtype=kv_dtype or dtype), {"dtype": dtype, **options}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    if not torch.cuda.is_available():
        print("tune: no GPU found; launch shapes are timed on the chip that they are for", file=sys.stderr)
        return 2
    try:
        keys, options = points_of(arguments)
    except ValueError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    import triton

    device = torch.device("cuda")
    chip = launch.device_of(device).chip
    file = arguments.table or CONFIGS / f"{chip}.json"
    software = f"torch {torch.__version__}, triton {triton.__version__}"
    measured = Measurement(torch.cuda.get_device_name(), software, str(date.today()))
    with Compiler(arguments.processes) as compiler:

        def compile_ahead(launches: Sequence[Launch]) -> "Future[str | None]":
            return compiler.submit(missing_variants(launches))

        start = start_with(graph_time, compile_ahead, device, **options)
        tune(chip, keys, start, file=file, measured=measured, fresh=arguments.fresh, show=print_progress)
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
