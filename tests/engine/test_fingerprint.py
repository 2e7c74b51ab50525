"""What makes two instances of a model equal, and blocks of two servers."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from paged_backend.api.block_layout import FULL, BlockLayout, WindowKind
from paged_backend.api.config import EngineConfig
from paged_backend.engine import fingerprint as engine_fingerprint
from paged_backend.engine.fingerprint import BlockSource, fingerprint
from paged_backend.utils import machine
from tests.support.in_process import TINY, tiny_assembly


def fingerprint_of(directory, **options):
    config = EngineConfig.from_options({"model": str(directory)} | TINY | options)
    assembly = tiny_assembly(directory, **options)
    return fingerprint(config, assembly.loaded, assembly.limits)


def test_fingerprint_depends_on_what_changes_tokens(tiny, tmp_path):
    shutil.copytree(tiny[0], tmp_path, dirs_exist_ok=True)
    same = fingerprint_of(tmp_path)
    assert same == fingerprint_of(tmp_path, num_gpu_blocks_override=80, max_num_seqs=4, enable_prefix_caching=False)
    assert same != fingerprint_of(tmp_path, dtype="bfloat16")
    assert same != fingerprint_of(tmp_path, block_size=8)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"@")
    assert same != fingerprint_of(tmp_path)


def test_fingerprint_depends_on_the_tokenizer_and_its_vocabulary(tiny, tmp_path):
    shutil.copytree(tiny[0], tmp_path, dirs_exist_ok=True)
    same = fingerprint_of(tiny[0], tokenizer=str(tmp_path))
    assert same != fingerprint_of(tiny[0])
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(file))
    assert same != fingerprint_of(tiny[0], tokenizer=str(tmp_path))


@pytest.mark.parametrize("options", [{"quantized_activations": "none"}])
def test_fingerprint_depends_on_rounding(tiny, options):
    assert fingerprint_of(tiny[0]) != fingerprint_of(tiny[0], **options)


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(9 << 20))
    monkeypatch.setattr(machine, "user_cache_directory", lambda: tmp_path / "user")
    config = EngineConfig(model="m")
    return BlockSource(config, BlockLayout(16), [tmp_path], torch.float32, torch.float32, torch.device("cpu"))


def test_fingerprint_is_that_of_a_copy_elsewhere(source, tmp_path):
    """A copy of the model has other inodes and times."""
    shutil.copytree(tmp_path, tmp_path / "copy", copy_function=shutil.copyfile)
    assert replace(source, models=[tmp_path / "copy"]).fingerprint == source.fingerprint


@pytest.mark.parametrize("in_place", [True, False])
def test_models_of_equal_sizes_and_times_are_told_apart(source, tmp_path, in_place):
    """As a fine-tune in a reproducible image: one byte of one tensor differs. in_place: the same inode."""
    weights = tmp_path / "model.safetensors"
    first, before, content = source.fingerprint, weights.stat(), bytearray(weights.read_bytes())
    content[5 << 20] ^= 1
    if not in_place:
        weights.unlink()
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert replace(source).fingerprint != first


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"kv_dtype": torch.int8},
        {"device": torch.device("cuda")},
        {"layout": BlockLayout(16, (FULL, WindowKind(1, 8)))},
        {"config": EngineConfig(model="m", block_size=8)},
        {"config": EngineConfig(model="m", quantization="int8")},
        {"config": EngineConfig(model="m", quantization="int8", quantization_group_size=32)},
        {"config": EngineConfig(model="m", quantization="int8", quantized_activations="none")},
        {"config": EngineConfig(model="m", load_format="dummy", seed=1)},
        {"config": EngineConfig(model="m", kv_cache_dtype="int8", kv_cache_dtype_skip_layers=[0])},
        {"config": EngineConfig(model="m", batch_invariant=True)},
    ],
    ids=str,
)
def test_fingerprints_depend_on_everything_that_changes_blocks(source, change):
    other = replace(source, **change)
    assert other.fingerprint != source.fingerprint


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_invariant_blocks_depend_on_the_arithmetic(source, monkeypatch, device):
    found = set()
    for arithmetic in ("one", "other"):
        monkeypatch.setattr(engine_fingerprint.native, "level", lambda arithmetic=arithmetic: arithmetic)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, arithmetic=arithmetic: arithmetic)
        config = EngineConfig(model="m", batch_invariant=True)
        found.add(replace(source, config=config, device=torch.device(device)).fingerprint)
    assert len(found) == 2


def test_blocks_of_another_format_are_not_found(source, monkeypatch):
    """Such as those of an earlier version."""
    fingerprint = source.fingerprint
    monkeypatch.setattr(engine_fingerprint, "FORMAT_VERSION", "0")
    assert replace(source).fingerprint != fingerprint
