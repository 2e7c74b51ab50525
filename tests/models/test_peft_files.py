"""PEFT's files of an adapter: ranks and scalings by layer, and the digest of the content."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from paged_backend.models.peft_files import CONFIG, WEIGHTS, AdapterError, read_adapter, read_config, signature

SHAPES = {"layers.0.q_proj": (4, 6), "layers.1.q_proj": (4, 6)}


def write(directory, *, rank=2, name="layers.0.q_proj", fill=1.0, **config):
    """Write an adapter of one layer, whose B is filled with a number."""
    (directory / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6} | config))
    tensors = {"A": torch.ones(rank, SHAPES[name][0]), "B": torch.full((SHAPES[name][1], rank), fill)}
    save_file({f"base_model.model.{name}.lora_{key}.weight": one for key, one in tensors.items()}, directory / WEIGHTS)
    return directory


def read(directory, max_rank=8):
    return read_adapter("a", directory, SHAPES, torch.float32, max_rank)


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / math.sqrt(2)),
        ({"alpha_pattern": {"q_proj": 8}}, 4.0),
        ({"alpha_pattern": {"layers.1.q_proj": 8}}, 3.0),
        ({"alpha_pattern": {"layers.0.q_proj": 10, "q_proj": 8}}, 5.0),  # the first pattern that matches
        ({"alpha_pattern": {"proj": 8}}, 3.0),  # a pattern matches whole parts of the name
    ],
)
def test_b_is_multiplied_by_the_scaling_of_its_layer(tmp_path, config, scaling):
    factors = read(write(tmp_path, **config)).factors["layers.0.q_proj"]
    torch.testing.assert_close(factors.b, torch.full((6, 2), scaling))
    assert torch.equal(factors.a, torch.ones(2, 4))


def test_rank_of_a_layer_follows_its_pattern(tmp_path):
    adapter = read(write(tmp_path, rank=5, rank_pattern={"0.q_proj": 5}))
    assert adapter.rank == 5
    config = read_config(tmp_path, max_rank=8)
    assert [config.rank_of(layer) for layer in SHAPES] == [5, 2]
    wrong = r"A.weight: has shape \[5, 4\]; must be \[2, 4\]|B.weight: has shape \[6, 5\]; must be \[6, 2\]"
    with pytest.raises(AdapterError, match=rf"lora_({wrong})"):
        read(write(tmp_path, rank=5))


def test_digest_depends_on_weights_and_configuration(tmp_path):
    digests = {read(write(tmp_path, **each)).digest for each in ({}, {"fill": 2.0}, {"lora_alpha": 7})}
    assert len(digests) == 3
    assert read(write(tmp_path)).digest in digests


def test_signature_changes_with_the_files_and_pickles_are_not_read(tmp_path):
    before = signature(write(tmp_path))
    assert signature(tmp_path) == before
    write(tmp_path, rank=3, rank_pattern={"q_proj": 3})
    assert signature(tmp_path) != before
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin: pickle files can execute code and are not read"):
        signature(tmp_path)
