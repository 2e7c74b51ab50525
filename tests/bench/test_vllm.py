"""vLLM as a contestant: the options that it gets, its outputs, and the records of a comparison.

A small module stands for vLLM. These tests do not show that a version of vLLM has this interface or accepts the
options, nor how fast it is.
"""

import json
import sys
from contextlib import ExitStack

import pytest
import torch

from paged_backend.api.config import EngineConfig
from paged_bench._vllm import VLLM, start
from paged_bench._workload import Job
from paged_bench.engine import OURS, measure
from tests.support.in_process import TINY, tiny_assembly

FAKE = """
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
    (package / "__init__.py").write_text(f"OPTIONS = {str(file)!r}\n{FAKE}")
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
        vllm = start(config, assembly, stack)
        assert vllm.kv_cache_tokens == 7 * 16
        assert vllm.run(jobs).outputs == [[3] * 4, [9] * 2]
        records = {one.name: one for one in measure(assembly, None, vllm, "2x3/4", jobs, rounds=2)}
    options = json.loads(options_file.read_text())
    assert options["model"] == str(tiny[0])
    assert options["multiprocessing"] == "0" and options["skip_tokenizer_init"]
    assert options["enable_prefix_caching"] is False and options["load_format"] == "auto"
    assert options["max_model_len"] == assembly.limits.max_model_len
    assert options["max_num_seqs"] == config.max_num_seqs
    assert options["kv_cache_memory_bytes"] == sum(tensor.nbytes for tensor in assembly.runner.kv.tensors)
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
        start(EngineConfig.from_options({"model": str(tiny[0])} | TINY), tiny_assembly(tiny[0]), stack)
