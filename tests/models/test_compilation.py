"""torch.compile of fused layers, in two successive processes that share a disk cache."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from paged_backend.models import compilation
from tests.support.families import FAMILIES, is_fused
from tests.support.in_process import generate_with_transformers, running, save_tiny, tiny_assembly

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")

ROOT = Path(__file__).parents[2]
PROMPTS = [[5] * length for length in (1, 2, 3, 5, 7, 11)]
# Reports what was compiled while the model was loaded, and what batches of many sizes added.
PROCESS = """
import json, sys
from pathlib import Path
from torch._dynamo.utils import counters
from tests.support.in_process import running, tiny_assembly

def num_compiled():
    return counters["stats"]["unique_graphs"]

def num_from_disk():
    return counters["aot_autograd"]["autograd_cache_hit"] or counters["inductor"]["fxgraph_cache_hit"]

assembly = tiny_assembly(Path(sys.argv[1]), compile_level=1)
loaded, prompts = num_compiled(), json.loads(sys.argv[2])
with running(assembly) as engine:
    single = [engine.generate([prompt], max_tokens=12)[0] for prompt in prompts]
    batched = engine.generate(prompts, max_tokens=12)
report = dict(loaded=loaded, served=num_compiled(), from_disk=num_from_disk(), single=single, batched=batched)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def processes(tiny, tmp_path_factory):
    """Return the reports of the two processes. Their cache is in the user's cache directory."""
    inherited = {name: value for name, value in os.environ.items() if name != compilation.CACHE_VARIABLE}
    cache = tmp_path_factory.mktemp("cache")
    environment = inherited | {
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": f"{ROOT}:{ROOT}/kernels:{ROOT}/client",
        "OMP_NUM_THREADS": "1",
    }
    reports = []
    for _ in range(2):
        command = [sys.executable, "-c", PROCESS, str(tiny[0]), json.dumps(PROMPTS)]
        process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert process.returncode == 0, process.stderr
        reports.append(json.loads(process.stdout.splitlines()[-1]))
    assert list((cache / "paged_llm/inductor").iterdir())
    return reports


def test_second_process_reuses_compilation_cache(processes):
    first, second = processes
    assert first["from_disk"] == 0
    assert second["from_disk"] == second["loaded"] == first["loaded"]


def test_layers_share_compiled_code_and_serving_compiles_nothing(processes):
    """Both functions are compiled for one token and for more. Three layers and many batch sizes add nothing."""
    for report in processes:
        assert report["served"] == report["loaded"] == 4


def test_compiled_tokens_match_generate(processes, tiny):
    expected = [generate_with_transformers(tiny[1], prompt, 12) for prompt in PROMPTS]
    for report in processes:
        assert report["single"] == report["batched"] == expected


def test_failed_compilation_falls_back_to_eager(tiny, monkeypatch, tmp_path, caplog):
    def broken(function, **options):
        def call(*arguments):
            raise RuntimeError("no compiler here\nand a page of text")

        return call

    monkeypatch.setattr(compilation.torch, "compile", broken)
    monkeypatch.setenv(compilation.CACHE_VARIABLE, str(tmp_path))
    assembly = tiny_assembly(tiny[0], compile_level=1)
    assert "torch.compile failed, running uncompiled: RuntimeError: no compiler here" in caplog.text
    assert is_fused(assembly.loaded.model)
    with running(assembly) as engine:
        assert engine.generate(PROMPTS[:1], max_tokens=12) == [generate_with_transformers(tiny[1], PROMPTS[0], 12)]


def test_wrong_compiled_code_is_not_used(tiny, monkeypatch, tmp_path, caplog):
    def wrong(function, **options):
        return lambda *arguments: tuple(2 * output for output in function(*arguments))

    monkeypatch.setattr(compilation.torch, "compile", wrong)
    monkeypatch.setenv(compilation.CACHE_VARIABLE, str(tmp_path))
    assembly = tiny_assembly(tiny[0], compile_level=1)
    assert "LlamaForCausalLM, compiled: logits at position" in caplog.text
    with running(assembly) as engine:
        assert engine.generate(PROMPTS[:1], max_tokens=12) == [generate_with_transformers(tiny[1], PROMPTS[0], 12)]


def test_compile_level_without_fusion_logs_warning(tmp_path, caplog):
    save_tiny(FAMILIES["olmo2"](), tmp_path)
    with caplog.at_level(logging.WARNING):
        tiny_assembly(tmp_path, compile_level=1)
    assert "Olmo2ForCausalLM is neither fused nor compiled: Olmo2Model is not a supported family" in caplog.text


def test_cache_directory_follows_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(compilation.CACHE_VARIABLE, default_cache_dir())  # as torch sets it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilation.cache_directory() == tmp_path / "paged_llm/inductor"
    monkeypatch.setenv(compilation.CACHE_VARIABLE, str(tmp_path / "own"))
    assert compilation.cache_directory() == tmp_path / "own"
