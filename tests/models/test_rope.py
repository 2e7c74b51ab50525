"""Rotary embeddings whose angles depend on the sequence length."""

import pytest
import torch
import transformers as hf

from paged_backend.models.rope import freeze_rope, max_static_len, parameters
from tests.support.families import COMMON, DYNAMIC, LONGROPE

SHORT = COMMON | {"max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "limit", "reason"),
    [
        (hf.LlamaConfig(**COMMON), 256, "the model's own limit"),
        (hf.LlamaConfig(**SHORT, rope_parameters=dict(DYNAMIC)), 64, 'rope type "dynamic"'),
        (
            hf.Phi3Config(**COMMON, original_max_position_embeddings=64, rope_parameters=dict(LONGROPE)),
            64,
            'rope type "longrope"',
        ),
    ],
    ids=["default", "dynamic", "longrope"],
)
def test_angles_are_constant_up_to_a_length(config, limit, reason):
    found, why = max_static_len(config)
    assert found == limit
    assert reason in why


def test_parameters_of_every_layer_type_are_found():
    types = {"full_attention": {"rope_type": "default"}, "sliding_attention": dict(DYNAMIC)}
    assert [one.get("rope_type") for one in parameters(hf.PretrainedConfig(rope_parameters=types))[1:]] == [
        "default",
        "dynamic",
    ]


def test_frozen_angles_do_not_depend_on_the_length():
    """Without freezing, a position beyond the limit changes the angles of all others."""
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**SHORT, rope_parameters=dict(DYNAMIC)))
    rotary, x = model.model.rotary_emb, torch.zeros(1, 1, 64)

    def angles(length):
        return rotary(x, torch.arange(length)[None])[0][0, :64]

    static = angles(64)
    assert not torch.equal(angles(200), static)
    angles(32)  # restores them
    freeze_rope(model)
    assert torch.equal(angles(200), static)
