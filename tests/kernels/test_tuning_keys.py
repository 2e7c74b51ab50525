"""The points that the tuner times."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import Gemma3Config, LlamaConfig, Qwen3Config

from paged_backend.models.fusion import FAMILIES
from paged_kernels import launch_table
from paged_kernels.launch_table import DEFAULT_ROW_TILES, ROW_BUCKETS, RowTuningKey, TuningKey
from paged_kernels.tune import FUSED, LENGTHS, candidates, model_keys, tuning_keys

# Runs an engine as on a GPU. Prints the keys that its launches look up, and those that the tuner would time.
LOOKED_UP = """
import json, os, sys, torch
from paged_backend.engine import warm_up
from paged_kernels import launch_table
from paged_kernels.tune import model_keys
from tests.support.fake_gpu import FAMILIES, load, on_fake_gpu
from tests.support.in_process import running

class Table:
    chip, found = "sm_90", set()

    def find(self, key):
        self.found.add(key)

def text(key):
    return repr(list(key)[:-1])  # without the bucket of lengths or rows

family, dtype, kv_dtype = sys.argv[1:]
config, assembly = load(family, {"dtype": dtype, "kv_cache_dtype": kv_dtype})
launch_table.use_table(Table())
with on_fake_gpu(assembly):
    with running(assembly) as engine:
        engine.wait(*(engine.submit([5] * length, max_tokens=2, temperature=1) for length in (200, 3)))
    warm_up.measure_costs(assembly.runner, 1e-3, 64)
types = {"auto": getattr(torch, dtype), "fp8": torch.float8_e4m3fn, "int8": torch.int8}
keys = model_keys(FAMILIES[family](), dtype=getattr(torch, dtype), kv_dtype=types[kv_dtype])
print(json.dumps([sorted({text(key) for key in found}) for found in (Table.found, keys)]), flush=True)
os._exit(0)  # without waiting for the engine's threads
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype"),
    [("llama", "float16", "auto"), ("qwen3", "bfloat16", "fp8")],
)
def test_keys_of_a_model_are_those_that_its_launches_look_up(family, dtype, kv_dtype, compiled_environment):
    command = [sys.executable, "-c", LOOKED_UP, family, dtype, kv_dtype]
    ended = subprocess.run(command, capture_output=True, text=True, env=compiled_environment, check=False)
    assert ended.returncode == 0, ended.stderr
    looked_up, keys = json.loads(ended.stdout.splitlines()[-1])
    assert looked_up == keys


def test_keys_cover_every_kernel_and_form_a_valid_table(tmp_path):
    assert len(set(tuning_keys(quick=False))) == len(tuning_keys(quick=False))
    assert set(tuning_keys(quick=True)) < set(tuning_keys(quick=False))
    for quick in (True, False):
        keys = tuning_keys(quick=quick)
        assert {getattr(key, "kind", None) for key in keys} == {None, *DEFAULT_ROW_TILES}
        rows = [(key, tile) for key in keys for tile in candidates(key)]
        for entries in (rows, rows[::-1]):
            launch_table.write_table(launch_table.Table("sm_90", dict(entries)), tmp_path / "sm_90.json")
            assert len(launch_table.read_table(tmp_path / "sm_90.json").tiles) == len(keys)
    assert len(tuning_keys(quick=True)) == 1 + len(DEFAULT_ROW_TILES)


LLAMA_8B = dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
)


def test_keys_of_an_8b_model():
    keys = model_keys(LlamaConfig(**LLAMA_8B), dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    assert keys[:3] == [TuningKey(128, 2, 16, False, length) for length in LENGTHS]  # most of the time of a prompt
    widths = {key.kind: key.width for key in keys[3:]}
    assert list(widths.items()) == [
        ("rope_kv_write", 4096), ("add_rms_norm", 4096), ("swiglu", 16384), ("sampling", 131072), ("block_copy", 32768),
    ]  # fmt: skip
    assert len(keys) == len(set(keys)) == 3 + 3 * 3 + 2
    assert set(keys) <= set(tuning_keys(quick=False))
    quantized = model_keys(LlamaConfig(**LLAMA_8B), dtype=torch.bfloat16, kv_dtype=torch.int8)
    assert quantized[0] == TuningKey(128, 2, 16, True, LENGTHS[0])
    assert quantized[-1] == RowTuningKey("block_copy", 16384, ROW_BUCKETS[-1])
    fp32 = model_keys(LlamaConfig(**LLAMA_8B | {"num_key_value_heads": 1}), dtype=torch.float32, kv_dtype=torch.float32)
    assert fp32[0] == TuningKey(128, 4, 16, False, LENGTHS[0])


def test_keys_of_models_with_other_layers():
    types = dict(dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    qwen = model_keys(Qwen3Config(**LLAMA_8B, head_dim=80), **types)
    assert qwen[0].block_d == 128
    assert RowTuningKey("norm_rope_kv_write", 32 * 128, ROW_BUCKETS[-1]) in qwen
    gemma = model_keys(Gemma3Config(text_config=dict(LLAMA_8B, head_dim=256)), **types)  # nested, and not fused
    assert gemma[0].block_d == 256
    assert {key.kind for key in gemma[3:]} == {"kv_write", "sampling", "block_copy"}


def test_fused_models_are_those_of_the_engine():
    assert set(FUSED) == set(FAMILIES)


def test_missing_size_is_named():
    config = LlamaConfig(**LLAMA_8B | {"intermediate_size": 0})
    with pytest.raises(ValueError, match="intermediate_size=0: must be a positive integer"):
        model_keys(config, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
