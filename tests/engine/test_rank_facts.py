"""Ranks compare the model's files and the software before they load a model."""

import shutil

import pytest

from paged_backend.engine import rank_facts as facts_of
from paged_backend.engine.rank_facts import find_difference, rank_facts


@pytest.fixture
def copies(tiny, tmp_path):
    """The directories of two copies of a model."""
    for name in ("one", "two"):
        shutil.copytree(tiny[0], tmp_path / name)
    return [tmp_path / name for name in ("one", "two")]


def test_copies_of_a_model_are_equal(copies):
    assert find_difference(*map(rank_facts, copies)) is None


def test_other_weights_of_the_same_shape_differ(copies, tmp_path):
    """A fine-tune changes most bytes of a file."""
    file = tmp_path / "two" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-len(data) // 3 :] = bytes(len(data[-len(data) // 3 :]))
    file.write_bytes(data)
    found = find_difference(*map(rank_facts, copies))
    assert found == "file model.safetensors of the model: differs from that on the server's machine"


def test_missing_files_and_other_versions_are_named(copies, tmp_path, monkeypatch):
    (tmp_path / "two" / "generation_config.json").unlink()
    one, two = map(rank_facts, copies)
    assert find_difference(one, two) == "file generation_config.json of the model: missing there"
    assert "missing on the server's machine" in find_difference(two, one)
    monkeypatch.setattr(facts_of.torch, "__version__", "0.1")
    difference = find_difference(one, rank_facts(copies[0]))
    assert difference.startswith("version of torch: differs from that on the server's machine (0.1, and ")
