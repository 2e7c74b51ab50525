"""The verification is not repeated at a start like an earlier one, and is at any other."""

import json
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

from paged_backend.files import content
from paged_backend.loading import earlier_starts, verification
from paged_backend.models import linear
from paged_backend.utils import machine
from tests.support.families import FAMILIES, is_fused
from tests.support.in_process import running, save_tiny, tiny_assembly

REPEATED = "not repeated, because the start of"


@pytest.fixture
def starts(tmp_path, monkeypatch, caplog):
    """A function that loads a model, and returns tokens and whether it was not verified again."""
    caplog.set_level("INFO", "paged_llm")
    monkeypatch.setattr(machine, "user_cache_directory", lambda: tmp_path / "user")

    def start(directory, **options):
        caplog.clear()
        with running(tiny_assembly(directory, **options)) as engine:
            tokens = engine.generate([[1, 2, 3, 4, 5]], max_tokens=8)
        return tokens, REPEATED in caplog.text

    return start


def test_the_same_start_compares_nothing(tiny, starts, tmp_path, monkeypatch, caplog):
    first, repeated = starts(tiny[0])
    assert not repeated
    monkeypatch.setattr(verification, "_compare", None)
    monkeypatch.setattr(verification, "_expect", None)
    assert starts(tiny[0]) == (first, True)
    shutil.copytree(tiny[0], tmp_path / "copy")
    assert starts(tmp_path / "copy") == (first, True)
    assert "LlamaForCausalLM runs fused" in caplog.text
    assert ", as verified at the start of 20" in caplog.text


def test_any_other_start_is_verified(tiny, starts, tmp_path, monkeypatch):
    directory = tmp_path / "model"
    shutil.copytree(tiny[0], directory)
    starts(directory)
    assert not starts(directory, block_size=8)[1]
    assert not starts(directory, skip_verification=True)[1]

    weights = directory / "model.safetensors"
    before, changed = weights.stat(), load_file(weights)
    changed["model.norm.weight"][0] *= 2
    save_file(changed, weights, metadata={"format": "pt"})
    assert weights.stat().st_size == before.st_size
    assert not starts(directory)[1]

    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    assert not starts(directory)[1]
    assert starts(directory)[1]
    with monkeypatch.context() as patch:
        patch.setenv("DNNL_MAX_CPU_ISA", "SSE41")
        assert not starts(directory)[1]
    for name in ("_code", "_machine"):
        with monkeypatch.context() as patch:
            patch.setattr(earlier_starts, name, lambda *arguments: "another")
            assert not starts(directory)[1]
    assert starts(directory)[1]


def test_sources_and_libraries_are_part_of_the_key(tmp_path, monkeypatch):
    """A start after an update of the package or of a library is another start."""

    def code():
        earlier_starts._code.cache_clear()
        return earlier_starts._code()

    own = code()
    assert own == code()
    source = tmp_path / "source.py"
    monkeypatch.setattr(earlier_starts, "source_files", lambda: [source])
    source.write_text("1")
    one = code()
    source.write_text("2")
    assert len({own, one, code()}) == 3
    monkeypatch.setattr(earlier_starts, "version", lambda name: "0")
    assert code() != one
    earlier_starts._code.cache_clear()


def test_unchanged_files_are_not_read_again(tiny, starts, tmp_path, monkeypatch):
    directory = tmp_path / "model"
    shutil.copytree(tiny[0], directory)
    starts(directory)
    read = []
    hash_of = content.hash_of
    monkeypatch.setattr(content, "hash_of", lambda file: read.append(file.name) or hash_of(file))
    (directory / "other.bin").write_text("not read by the model")
    assert starts(directory)[1]
    assert read == []
    before = (directory / "model.safetensors").stat()
    os.utime(directory / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync does
    assert starts(directory)[1]
    assert read == ["model.safetensors"]


@pytest.mark.parametrize("damage", ["", "{}", '{"variant": 1, "latents": false, "keeps_unused": false}'])
def test_damaged_or_outdated_results_are_ignored(tiny, starts, tmp_path, caplog, damage):
    first, _ = starts(tiny[0])
    (stored,) = (tmp_path / "user" / "starts").glob("start-*.json")
    stored.write_text(damage)
    assert starts(tiny[0]) == (first, False)
    assert "earlier start" in caplog.text
    assert starts(tiny[0]) == (first, True)


@pytest.mark.parametrize("damage", ["[]", '{"model.safetensors": 5}'])
def test_damaged_hashes_are_ignored(tiny, starts, tmp_path, damage):
    first, _ = starts(tiny[0])
    (stored,) = (tmp_path / "user" / "starts").glob("files-*.json")
    stored.write_text(damage)
    assert starts(tiny[0]) == (first, True)


def test_reuse_can_be_turned_off(tiny, starts):
    assert not starts(tiny[0], reuse_verification=False)[1]
    assert not starts(tiny[0], reuse_verification=False)[1]
    assert starts(tiny[0])[1]  # what was found is stored


def test_an_unusable_directory_is_no_error(tiny, starts, tmp_path, caplog):
    (tmp_path / "user").write_text("")
    assert not starts(tiny[0])[1]
    assert "not stored" in caplog.text


def test_a_slower_variant_is_verified_again(tiny, starts, monkeypatch):
    """The faster variant may have failed for want of memory, and may pass next time."""
    compare = verification._compare

    def fails_if_fused(model, *arguments):
        if is_fused(model):
            raise verification.UnsupportedModel("one mistake")
        return compare(model, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(verification, "_compare", fails_if_fused)
        starts(tiny[0])
    assert not starts(tiny[0])[1]
    assert starts(tiny[0])[1]


def test_a_start_without_memory_for_copies_is_verified_again(tiny, starts, monkeypatch):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(linear, "available_memory", lambda: 0)
        starts(tiny[0])
    assert not starts(tiny[0])[1]
    assert starts(tiny[0])[1]


def test_latents_are_stored_again(starts, tmp_path):
    save_tiny(FAMILIES["deepseek_v3"](), tmp_path)
    first, _ = starts(tmp_path)
    assert starts(tmp_path) == (first, True)
