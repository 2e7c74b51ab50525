"""The other engines: transformers, child processes and vLLM."""

import json
import math
import os
import select
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paged_backend.api.config import EngineConfig
from paged_bench import _peers
from paged_bench._engine import OURS, Job
from paged_bench._peers import CHILDREN, VLLM, Child, ChildError, LlamaCpp, padded, start_vllm
from paged_bench.engine import compare
from tests.support.in_process import TINY, tiny_assembly
from tests.support.waiting import WAIT, until

# --- peers ------------------------------------------------------------------------------------------------------------


def test_padded_batch_is_limited_by_memory(tiny):
    jobs = [Job([1] * prompt, 4) for prompt in (5, 12, 7)]
    row = (12 + 4) * 3 * 2 * 2 * 16 * 4  # slots, layers, keys and values, heads, width, float32
    for memory, count in ((math.inf, 3), (2 * row, 2), (2 * row - 1, 1), (0, 1)):
        run = padded(tiny[1], memory)(jobs)
        assert run.requests == count
        assert run.peak_tokens == sum(len(job.prompt) + 3 for job in jobs[:count])


# --- child ------------------------------------------------------------------------------------------------------------


CHILD = """
import os, sys
sys.path.insert(0, {children!r})
from protocol import Clock, serve

def load(first):
    print("a library that prints")
    return {{"first": first, "pid": os.getpid(), "group": os.getpgrp()}}

def run(jobs):
    clock = Clock(jobs)
    for key, job in enumerate(jobs):
        if not job["prompt"]:
            os._exit(3)
        for at in range(job["output"]):
            for sample in range(job["n"]):
                clock.tokens(key, sample, [job["prompt"][at]], job["arrival"] + at)
    return clock.result()

serve({{"load": load, "run": run}})
"""


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "fake_child.py"
    script.write_text(CHILD.format(children=str(CHILDREN)))
    child = Child([sys.executable, script], tmp_path / "log")
    yield child
    child.close()


def test_child_runs_jobs_and_returns_its_settings(fake, tmp_path):
    assert fake.load(first=7)["first"] == 7
    run = fake([Job([5, 6, 7], 2, arrival=9.0), Job([8, 9], 1, n=2)])
    assert run.outputs == [[5, 6], [8]]
    assert run.stamps == [[0, 1], [0], [0]]
    assert run.seconds > 0
    assert "a library that prints" in (tmp_path / "log").read_text()


QUANTIZING_CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {children!r})
from protocol import serve

def quantize(source, target, kind, num_threads):
    Path(target).write_text(Path(source).read_text() + kind)
    return {{}}

serve({{"quantize": quantize}})
"""


def test_llama_cpp_quantizes_in_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "llama_cpp_child.py").write_text(QUANTIZING_CHILD.format(children=str(CHILDREN)))
    environment = SimpleNamespace(python=sys.executable, directory=tmp_path, ensure=lambda: None)
    monkeypatch.setattr(_peers, "llama_cpp", lambda level: environment)
    monkeypatch.setattr(_peers, "CHILDREN", tmp_path)
    (source := tmp_path / "source").write_text("weights in ")
    with ExitStack() as stack:
        LlamaCpp(1, stack).quantize(source, tmp_path / "target", "Q4_0")
    assert (tmp_path / "target").read_text() == "weights in Q4_0"


def test_child_errors_name_the_log(fake, tmp_path):
    with pytest.raises(ChildError, match=r"load: TypeError: .*unexpected keyword"):
        fake.load(second=7)
    with pytest.raises(ChildError, match="run: IndexError"):
        fake([Job([5], 2)])
    with pytest.raises(ChildError, match=f"run: it exited with 3; its log is {tmp_path / 'log'}"):
        fake([Job([], 1)])
    with pytest.raises(ChildError, match="run: "):
        fake([Job([5], 1)])


def test_child_process_group_is_stopped_between_commands(fake):
    about = fake.load(first=1)
    assert about["group"] == about["pid"]
    deadline = time.monotonic() + 60
    while not os.waitpid(about["pid"], os.WUNTRACED | os.WNOHANG)[0]:
        assert time.monotonic() < deadline
    assert fake([Job([5], 1)]).outputs == [[5]]


def test_closed_child_exits_by_itself(tmp_path):
    script, end = tmp_path / "fake_child.py", tmp_path / "end"
    after = f"open({str(end)!r}, 'w').close()"
    script.write_text(CHILD.format(children=str(CHILDREN)) + after)
    child = Child([sys.executable, script], tmp_path / "log")
    child.load(first=1)
    child.close()
    assert end.exists()


BENCHMARK = """
import os, sys
from pathlib import Path
from paged_bench._peers import Child
from paged_bench.cpu import neighbours

child = Child([sys.executable, {script!r}], Path({log!r}))
with neighbours(19):
    loaded = child.load(first=1)
    os.waitpid(loaded["pid"], os.WUNTRACED)
    if {runs}:
        child._write('{{"do": "hang", "with": {{}}}}\\n')
        child._process.signal_group(18)
    print(loaded["pid"], flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("runs", [False, True], ids=["stopped", "running"])
def test_killed_benchmark_leaves_no_process(tmp_path, runs):
    """Neither a child that is stopped, or that computes and reads nothing, nor its own child, nor the neighbour."""
    script = tmp_path / "fake_child.py"
    worker = "import subprocess, sys, time\nworker = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
    script.write_text(
        worker
        + CHILD.format(children=str(CHILDREN)).replace('"run": run', '"run": run, "hang": lambda: time.sleep(600)')
    )
    program = BENCHMARK.format(script=str(script), log=str(tmp_path / "log"), runs=runs)
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout.readline()
        until(lambda: len(started := descendants(benchmark.pid)) >= 5 and all(started.values()), "its processes")
        watched = [os.pidfd_open(process) for process in descendants(benchmark.pid)]
        benchmark.kill()
    for process in watched:
        ended, _, _ = select.select([process], [], [], WAIT)
        os.close(process)
        assert ended


def descendants(parent):
    """Return the command lines of the child processes of a process, and of theirs, by process id."""
    found = {}
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdigit():
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    found |= {int(entry): Path(f"/proc/{entry}/cmdline").read_text()} | descendants(int(entry))
    return found


# --- vllm -------------------------------------------------------------------------------------------------------------


FAKE_VLLM = """
import json, os
from types import SimpleNamespace

__version__ = "0.0.fake"

class EngineArgs:
    def __init__(self, **options):
        self.options = options

class SamplingParams:
    def __init__(self, **options):
        self.__dict__ |= options

class LLMEngine:
    @classmethod
    def from_engine_args(cls, args):
        engine = cls()
        json.dump(args.options | {"multiprocessing": os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]}, open(OPTIONS, "w"))
        cache = SimpleNamespace(num_gpu_blocks=7, block_size=16, enable_prefix_caching=False)
        scheduler = SimpleNamespace(max_num_batched_tokens=1, max_num_seqs=1)
        engine.vllm_config = SimpleNamespace(cache_config=cache, scheduler_config=scheduler)
        engine.waiting = {}
        return engine

    def add_request(self, key, prompt, sampling):
        self.waiting[key] = [len(prompt["prompt_token_ids"]), sampling.max_tokens]

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        outputs = [
            SimpleNamespace(request_id=key, outputs=[SimpleNamespace(index=0, token_ids=[first])])
            for key, (first, left) in self.waiting.items()
        ]
        self.waiting = {key: [first, left - 1] for key, (first, left) in self.waiting.items() if left > 1}
        return outputs
"""


@pytest.fixture
def options_file(tmp_path, monkeypatch):
    """Install a fake vllm, and return the file with the options that it gets."""
    package, file = tmp_path / "vllm", tmp_path / "options.json"
    package.mkdir()
    (package / "__init__.py").write_text(f"OPTIONS = {str(file)!r}\n{FAKE_VLLM}")
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 << 30, 80 << 30))
    return file


def test_vllm_runs_the_same_requests_with_a_kv_cache_of_the_same_size(tiny, options_file):
    config = EngineConfig.from_options({"model": str(tiny[0])} | TINY | {"enable_prefix_caching": False})
    assembly = tiny_assembly(tiny[0], enable_prefix_caching=False)
    jobs = [Job([5, 6, 7], 4), Job([5] * 9, 2)]
    with ExitStack() as stack:
        vllm = start_vllm(config, assembly, stack)
        assert vllm.kv_cache_tokens == 7 * 16
        assert vllm.run(jobs).outputs == [[3] * 4, [9] * 2]
        records = {one.name: one for one in compare(assembly, None, vllm, "2x3/4", jobs, rounds=2)}
    options = json.loads(options_file.read_text())
    assert options["model"] == str(tiny[0])
    assert options["multiprocessing"] == "0" and options["skip_tokenizer_init"]
    assert options["enable_prefix_caching"] is False and options["load_format"] == "auto"
    assert options["max_model_len"] == assembly.limits.max_model_len
    assert options["max_num_seqs"] == config.max_num_seqs
    assert options["kv_cache_memory_bytes"] == assembly.runner.kv.memory.nbytes
    assert options["gpu_memory_utilization"] < 30 / 80
    sizes = records["KV cache 2x3/4"]
    assert (sizes.value, sizes.unit, sizes.peers) == (64 * 4, "tokens", {VLLM: 7 * 16})
    assert records["output_throughput 2x3/4"].peers.keys() == {VLLM}
    assert records["output_throughput 2x3/4, first round"].value > 0
    for who in (OURS, VLLM):
        assert records[f"time to first token p50 2x3/4 ({who})"].value > 0


def test_missing_vllm_is_reported(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with ExitStack() as stack, pytest.raises(ModuleNotFoundError, match="vllm is not installed"):
        start_vllm(EngineConfig.from_options({"model": str(tiny[0])} | TINY), tiny_assembly(tiny[0]), stack)
