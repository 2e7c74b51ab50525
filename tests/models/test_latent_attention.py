"""DeepSeek's attention stores one latent per token, and gives the tokens of transformers in both of its forms."""

import pytest
import torch

from paged_backend.kv.cache import LayerShape, bytes_per_token
from paged_backend.models import latent_attention
from paged_backend.models.latent_attention import LatentAttention
from tests.support.adapters import LORA, make_adapter, write_adapter_list
from tests.support.in_process import running
from tests.support.tiny_family import MAX_TOKENS, TinyFamily

FAMILIES = ["deepseek_v2", "deepseek_v3", "deepseek_v3_yarn"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return TinyFamily.create(request.param, tmp_path_factory.mktemp("family"))


def test_latents_are_stored_once(family):
    config = family.model.config
    size = config.kv_lora_rank + config.qk_rope_head_dim
    kv = family.assembly().runner.kv
    assert kv.memory[0].nbytes == config.num_hidden_layers * 4 * size * kv.layers[0].keys.itemsize
    assert {tuple(layer.keys.shape[1:]) for layer in kv.layers} == {(1, 4, size)}
    assert all(layer.values.data_ptr() == layer.keys.data_ptr() for layer in kv.layers)


def test_memory_of_deepseek_v3():
    """576 elements per token and layer, in place of keys of 192 and values of 128 for each of 128 heads."""
    latent, expanded = LayerShape(1, 576, 512, latent=True), LayerShape(128, 192, 128)
    assert bytes_per_token([latent], torch.bfloat16) == 2 * 576
    assert bytes_per_token([expanded], torch.bfloat16) == 2 * 128 * (192 + 128)


def test_long_chunks_are_expanded(family, monkeypatch):
    """In one batch with short ones, which are absorbed."""
    monkeypatch.setattr(latent_attention, "MIN_EXPANDED_ROWS", 2)
    forms = []
    for name in ("_absorbed", "_expanded"):
        original = getattr(LatentAttention, name)
        monkeypatch.setattr(
            LatentAttention,
            name,
            lambda self, *arguments, name=name, original=original: forms.append(name) or original(self, *arguments),
        )
    monkeypatch.setattr(LatentAttention, "_break_even", lambda self: 5)
    assembly = family.assembly(max_num_batched_tokens=30, enable_prefix_caching=False)
    forms.clear()
    with running(assembly) as engine:
        assert engine.generate(family.prompts, max_tokens=MAX_TOKENS) == family.outputs
    assert set(forms) == {"_absorbed", "_expanded"}


def test_no_chunk_is_expanded_with_batch_invariant(family, monkeypatch):
    monkeypatch.setattr(LatentAttention, "_break_even", lambda self: 5)
    monkeypatch.setattr(LatentAttention, "_expanded", None)
    assembly = family.assembly(max_num_batched_tokens=30, dtype="bfloat16", batch_invariant=True)
    with running(assembly) as engine:
        engine.generate(family.prompts, max_tokens=MAX_TOKENS)  # would fail with the expanded form


@pytest.mark.parametrize("form", ["_absorbed", "_expanded"])
def test_wrong_latents_are_not_used(family, monkeypatch, caplog, form):
    original = getattr(LatentAttention, form)
    monkeypatch.setattr(LatentAttention, form, lambda *arguments: 2 * original(*arguments))
    assembly = family.assembly()
    assert "stores expanded keys and values; with latents: logits at position" in caplog.text
    with running(assembly) as engine:
        assert engine.generate(family.prompts, max_tokens=MAX_TOKENS) == family.outputs


def test_break_even_of_deepseek_v3():
    """The expansion of a token costs 512 * 256 products per head, and saves 768 for each row."""
    module = torch.nn.Module()
    module.kv_lora_rank, module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim = 512, 128, 64, 128
    attention = LatentAttention(module, torch.zeros(2 * 256, 512))
    assert attention._break_even() == 512 * 256 // 768 + 1


def test_adapter_of_the_absorbed_layer_is_rejected(family):
    adapter = make_adapter(family.model, family.directory / "absorbed", target_modules=["kv_b_proj"])
    assembly = family.assembly(adapters=write_adapter_list(family.directory, {"absorbed": adapter}), **LORA)
    with running(assembly) as engine:
        (output,) = engine.wait(engine.submit(family.prompts[0], lora_name="absorbed"))
    assert "kv_b_proj" in str(output.error)
