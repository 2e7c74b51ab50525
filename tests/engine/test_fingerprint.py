"""What makes two instances of a model equal."""

import shutil

import pytest
from tokenizers import Tokenizer

from paged_backend.api.config import EngineConfig
from paged_backend.engine.fingerprint import fingerprint
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
