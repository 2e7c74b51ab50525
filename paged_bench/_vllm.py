"""vLLM as a contestant on a GPU, if it is installed in the interpreter that runs the benchmark."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import Assembly
from paged_bench._child import CHILDREN, Child
from paged_bench._workload import Contestant

VLLM = "vLLM"
FREE_SHARE = 0.9  # of the free memory; the rest is left for what vLLM does not count


@dataclass(frozen=True)
class Vllm:
    """A loaded vLLM."""

    run: Contestant
    kv_cache_tokens: int


def start(config: EngineConfig, assembly: Assembly, stack: ExitStack) -> Vllm:
    """Start vLLM with the limits of `assembly` and a KV cache of the same size, in a process that `stack` ends.

    Raises ModuleNotFoundError if it is not installed, and ChildError.

    Its options are fields of `EngineArgs` (docs.vllm.ai, "Engine Arguments", 0.20): `kv_cache_memory_bytes` replaces
    the size that it would derive from `gpu_memory_utilization`, which then is only checked against the free memory. Its
    engine runs in the process of the caller, as ours does, and the prompts are token ids.
    """
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("vllm is not installed")
    spec = assembly.loaded.spec
    free, total = torch.cuda.mem_get_info(assembly.device)
    log = Path(tempfile.mkdtemp(prefix="paged-bench-"), "vllm.log")
    paths = os.environ.get("PYTHONPATH", "")  # vLLM may be on it
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": paths}
    child = Child([sys.executable, CHILDREN / "vllm_child.py"], log, variables)
    stack.callback(child.close)
    print(f"{VLLM}: loading, its log is {log} ...", file=sys.stderr, flush=True)
    settings = child.load(
        model=str(assembly.loaded.path),
        skip_tokenizer_init=True,
        load_format="dummy" if config.load_format == "dummy" else "auto",
        dtype=str(spec.dtype).removeprefix("torch."),
        max_model_len=assembly.limits.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        gpu_memory_utilization=FREE_SHARE * free / total,
        kv_cache_memory_bytes=sum(tensor.nbytes for tensor in assembly.runner.kv.tensors),
    )
    print(f"{VLLM}: {', '.join(f'{name}={value}' for name, value in settings.items())}")
    return Vllm(child, int(settings["kv_cache_tokens"]))
