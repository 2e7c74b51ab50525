"""Rotary embeddings: angles that depend on the sequence length, and tables."""

import pytest
import torch
import transformers as hf

from paged_backend.loading import verification
from paged_backend.models import rope
from paged_backend.models.decoder import FusedDecoder
from paged_backend.models.rope import ConvertedAngles, RotaryTable, freeze_rope, max_static_len, parameters
from tests.support.families import COMMON, DYNAMIC, FAMILIES, LONGROPE, is_fused

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


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}


def verified_llama(kind, dtype=torch.float32):
    config = hf.LlamaConfig(**COMMON | {"rope_parameters": dict(ROPES[kind])})
    model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    verification.verify_model(model, block_size=4, kv_dtype=dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ROPES)
def test_fused_models_look_up_the_angles_of_every_position(kind, dtype, monkeypatch):
    monkeypatch.setattr(rope, "CHUNK", 50)
    model = verified_llama(kind, dtype)
    rotary, table = model.model.rotary_emb, FusedDecoder.of(model).angles
    assert isinstance(table, RotaryTable)
    limit, _ = max_static_len(model.config)
    ids, x = torch.randint(limit, (1, 70)), torch.zeros(1, 1, 8, dtype=dtype)
    ids[0, :2] = torch.tensor([0, limit - 1])
    found, expected = table(x, ids), rotary(x, position_ids=ids)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6 if dtype == torch.float32 else 4e-3)


def test_large_tables_are_not_made(monkeypatch):
    monkeypatch.setattr(rope, "MAX_BYTES", 1000)
    model = verified_llama("default")
    assert FusedDecoder.of(model).angles is model.model.rotary_emb


@pytest.mark.parametrize("max_bytes", [rope.MAX_BYTES, 1000])
def test_angles_of_gpt_oss_are_repeated_for_the_second_half_of_a_head(monkeypatch, max_bytes):
    monkeypatch.setattr(rope, "MAX_BYTES", max_bytes)
    config = FAMILIES["gpt_oss"]()
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    verification.verify_model(model, block_size=4, kv_dtype=torch.float32)
    assert is_fused(model)
    rotary, angles = model.model.rotary_emb, FusedDecoder.of(model).angles
    ids, x = torch.tensor([[0, 200, 7]]), torch.zeros(1, 1, 8)
    assert isinstance(angles, RotaryTable if max_bytes > 1000 else ConvertedAngles)
    for one, half in zip(angles(x, ids), rotary(x, ids), strict=True):
        torch.testing.assert_close(one, torch.cat((half, half), -1), rtol=0, atol=2e-6)


def test_an_unfused_model_computes_its_angles(caplog, monkeypatch):
    monkeypatch.setattr("paged_backend.models.decoder.add_rms_norm", lambda x, *_: (x, x))  # fails the verification
    model = verified_llama("default")
    assert "logits" in caplog.text
    assert "forward" not in vars(model.model)
