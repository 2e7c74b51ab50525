"""The engines that `paged bench cpu` compares, and how they are started."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from ctypes.util import find_library
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import Assembly
from paged_backend.scheduling.scheduler import Scheduler
from paged_bench import _peers
from paged_bench._child import CHILDREN, Child
from paged_bench._cpu_scenarios import (
    CONTINUOUS,
    LLAMA_CPP_NAME,
    LLAMA_CPP_PACKED,
    PADDED,
    PEERS,
    VLLM_NAME,
)
from paged_bench._environments import LLAMA_CPP, VLLM
from paged_bench._gguf import FASTEST_4_BIT, demo_gguf, quantized_gguf
from paged_bench._workload import Contestant, Job, Run, model_options
from paged_bench.engine import OURS, run_paged
from paged_client.serving.environments import PackageEnvironment

KV_GIB = 2  # size of each contestant's KV cache
ONE_THREAD = ", 1 thread"  # after the name of a peer that runs beside a busy process with one thread


@dataclass
class Contestants:
    """The available contestants, and why the others are not available."""

    available: dict[str, Contestant]
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, names: Sequence[str], start: Callable[[], Mapping[str, Contestant]]) -> None:
        """Start contestants. An error makes them absent, but does not end the benchmark."""
        print(f"{names[0]}: loading ...", file=sys.stderr, flush=True)
        try:
            self.available.update(start())
        except Exception as error:
            self.leave_out(names, first_line(error))

    def leave_out(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            self.available.pop(name, None)
            self.absent[name] = reason

    def warm_up(self, jobs: Sequence[Job]) -> None:
        """Run every contestant once, so that compilation and allocation are not timed."""
        for name, run in list(self.available.items()):
            try:
                run(jobs)
            except Exception as error:
                if name == OURS:
                    raise
                self.leave_out([name], first_line(error))


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def gather(args: Namespace, config: EngineConfig, assembly: Assembly, stack: ExitStack) -> Contestants:
    """Start our engine and all peers in --peers. Those in other processes are closed by `stack`."""
    contestants = Contestants({OURS: partial(run_paged, assembly)})
    selected = [peer for peer in PEERS if peer in args.peers]
    for peer in PEERS.keys() - selected:
        contestants.leave_out(PEERS[peer], f"not among --peers ({', '.join(selected)})")
    model = str(assembly.loaded.path)
    for threads in dict.fromkeys((args.threads, 1)):  # the last ones are for _cpu_busy, where they may be faster
        suffix = "" if threads == args.threads else ONE_THREAD

        def add(names: Sequence[str], start: Callable[[], Mapping[str, Contestant]], suffix: str = suffix) -> None:
            contestants.add([name + suffix for name in names], lambda: {k + suffix: v for k, v in start().items()})

        if "vllm" in selected:
            options = {"model": model, "dtype": args.dtype, "max_model_len": assembly.limits.max_model_len}
            add(PEERS["vllm"], partial(_start_vllm, options, threads, stack))
        if "llama.cpp" in selected:
            add(PEERS["llama.cpp"], partial(_start_llama_cpp, model, args.dtype, threads, stack))
        local = [name for peer in ("generate", "batching") if peer in selected for name in PEERS[peer]]
        if local:
            add(local, partial(_load_transformers, config, assembly, local, threads))
    return contestants


def _start_vllm(options: Mapping[str, Any], threads: int, stack: ExitStack) -> Mapping[str, Contestant]:
    """Start vLLM as its documentation recommends for CPUs.

    The threads of its worker are bound to cores, and Intel's OpenMP and, if installed, tcmalloc are preloaded.
    """
    VLLM.ensure()
    preloaded = [VLLM.directory / "lib" / "libiomp5.so", find_library("tcmalloc_minimal")]
    variables = {
        "LD_PRELOAD": ":".join(str(library) for library in preloaded if library),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads]),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CACHE_ROOT": str(VLLM.directory / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(VLLM.directory / "cache" / "inductor"),
        "VLLM_USE_AOT_COMPILE": "0",  # 0.32.0 cannot load the code that it saves this way, and compiles at each start
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    child = _start_child(VLLM, "vllm_child.py", variables, stack)
    settings = child.load(**options) | {"preloaded": variables["LD_PRELOAD"].replace(f"{VLLM.directory}/", "")}
    _print_settings(f"{VLLM.package} {VLLM.version}", settings)
    return {VLLM_NAME: child}


def _start_llama_cpp(model: str, dtype: str, threads: int, stack: ExitStack) -> Mapping[str, Contestant]:
    """Start llama.cpp with the weights of the other engines, and with its fastest 4-bit ones, by contestant. Its keys
    and values have the type of the other engines'."""
    if model != model_options("demo")["model"]:
        raise ValueError("only the demo model is available as a GGUF file")
    LLAMA_CPP.ensure()

    def quantize(source: Path, target: Path) -> None:
        child = _start_child(LLAMA_CPP, "llama_cpp_child.py", {}, stack)
        child.quantize(source=str(source), target=str(target), kind=FASTEST_4_BIT, num_threads=threads)
        child.close()

    files = {LLAMA_CPP_NAME: demo_gguf(dtype), LLAMA_CPP_PACKED: quantized_gguf(FASTEST_4_BIT, quantize)}
    children = {}
    for name, file in files.items():
        child = _start_child(LLAMA_CPP, "llama_cpp_child.py", {}, stack)
        settings = child.load(path=str(file), num_threads=threads, kv_dtype=dtype)
        _print_settings(f"{LLAMA_CPP.package} {LLAMA_CPP.version}, {threads} threads", settings)
        children[name] = child
    return children


def _start_child(environment: PackageEnvironment, script: str, variables: Mapping[str, str], stack: ExitStack) -> Child:
    log = environment.directory / f"{Path(script).stem}.log"
    child = Child([environment.python, CHILDREN / script], log, variables)
    stack.callback(child.close)
    return child


def _load_transformers(
    config: EngineConfig, assembly: Assembly, names: Sequence[str], threads: int
) -> Mapping[str, Contestant]:
    model = _peers.load(config, assembly.loaded, assembly.device)
    budget = assembly.scheduler.max_num_batched_tokens
    both = {PADDED: _peers.padded(model), CONTINUOUS: _peers.continuous(model, budget, tuned=False, sharing=True)}
    return {name: _with_threads(both[name], threads) for name in names}


def _with_threads(run: Contestant, threads: int) -> Contestant:
    """Return a contestant in this process with this number of PyTorch's threads."""

    def limited(jobs: Sequence[Job]) -> Run:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return run(jobs)
        finally:
            torch.set_num_threads(before)

    return limited


def without_step_target(config: EngineConfig, assembly: Assembly) -> Assembly:
    """Return the engine without `target_step_ms`, which would shorten the prompt chunks of a step.

    The first sequence then still decodes when the last one starts, also on a slow machine.
    """
    budget, scheduler = config.max_num_batched_tokens, assembly.scheduler
    unpaced = Scheduler(
        scheduler.blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=budget, costs=scheduler.costs
    )
    return replace(assembly, scheduler=unpaced)


def print_our_settings(config: EngineConfig, assembly: Assembly) -> None:
    settings = {
        "dtype": str(assembly.loaded.spec.dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
    }
    _print_settings(OURS, settings)


def _print_settings(engine: str, settings: Mapping[str, Any]) -> None:
    print(f"{engine}: {', '.join(f'{name}={value}' for name, value in settings.items())}")
