"""The verification at load rejects models that paged attention does not compute correctly."""

import pytest
import torch
import transformers as hf

from paged_backend.loading import verification
from paged_backend.loading.attention_probe import AttentionProbe
from paged_backend.loading.verification import verify_model
from paged_backend.models.attention import UnsupportedModel
from paged_kernels.layer_cache import INT4
from paged_kernels.packed_blocks import NAN_SCALE
from tests.support.families import COMMON, REJECTED_FAMILIES
from tests.support.gguf import CONFIG
from tests.support.in_process import byte_tokenizer, save_tiny, tiny_assembly


def save(config, directory):
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (REJECTED_FAMILIES["bloom"](), "0 of 2 layers call"),
        (REJECTED_FAMILIES["gpt_neo"](), "layers"),
        (hf.StableLmConfig(**COMMON), "its paged forward pass fails"),
        (
            hf.MiniMaxConfig(**COMMON, head_dim=16, block_size=4, num_local_experts=2),
            r"layers call .*\(MiniMaxLightningAttention\)",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_unsupported_model_is_rejected_by_name(tmp_path, config, reason):
    save(config, tmp_path)
    with pytest.raises(UnsupportedModel, match=f"ForCausalLM cannot be served with paged attention: .*{reason}"):
        tiny_assembly(tmp_path, max_model_len=64)


@pytest.fixture
def wrong_scale(monkeypatch):
    from paged_backend.models import attention

    correct = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda *a, scale, **k: correct(*a, scale=scale * 1.5, **k))


@pytest.mark.usefixtures("wrong_scale")
def test_wrong_paged_logits_are_rejected(tiny):
    """An attention function with a wrong scale must not pass the verification."""
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* logits at position"):
        tiny_assembly(tiny[0])


def test_blocks_in_four_bits_are_verified(monkeypatch):
    """A prompt is long enough to read one."""
    config = hf.LlamaConfig(**COMMON | {"head_dim": 32})
    verify_model(hf.AutoModelForCausalLM.from_config(config).eval(), block_size=32, kv_dtype=INT4)
    correct = verification.paged_logits

    def overwritten(model, batch, kv):
        for cache in kv.layers:
            if cache.packed:
                cache.packed.value_scales.fill_(NAN_SCALE)
        return correct(model, batch, kv)

    monkeypatch.setattr(verification, "paged_logits", overwritten)
    with pytest.raises(UnsupportedModel, match=r"with torch.uint4 keys and values .*, logits at position"):
        verify_model(hf.AutoModelForCausalLM.from_config(config).eval(), block_size=32, kv_dtype=INT4)


def sensitive_model():
    """A model that amplifies rounding errors, because its attention is sharp and its layers change the hidden states a
    lot. In bfloat16, correct logits differ by 0.1 to 0.2."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**COMMON | {"num_hidden_layers": 8}))
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        sharp = (attention.q_proj, attention.k_proj)
        large = (attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        for linear in (*sharp, *large):
            linear.weight.data *= 16 if linear in sharp else 9
    return model.eval().to(torch.bfloat16)


def test_rounding_errors_that_a_model_amplifies_are_allowed(caplog):
    caplog.set_level("INFO", "paged_llm")
    verify_model(sensitive_model(), block_size=4, kv_dtype=torch.bfloat16)
    assert "LlamaForCausalLM runs fused" in caplog.text and "logits at position" not in caplog.text


@pytest.mark.usefixtures("wrong_scale")
def test_wrong_logits_of_a_sensitive_model_are_rejected():
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* logits at position"):
        verify_model(sensitive_model(), block_size=4, kv_dtype=torch.bfloat16)


@pytest.mark.usefixtures("wrong_scale")
def test_skipped_verification_is_logged(tiny, caplog):
    tiny_assembly(tiny[0], skip_verification=True)
    assert "skip_verification=true: the logits of LlamaForCausalLM were not compared" in caplog.text


def large_model():
    """A model whose hidden states reach 40,000."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**COMMON))
    mlp = model.model.layers[1].mlp
    for linear, factor in ((mlp.gate_proj, 50), (mlp.up_proj, 50), (mlp.down_proj, 1000)):
        linear.weight.data *= factor
    return model.eval()


def test_type_whose_range_is_exceeded_is_refused():
    message = (
        r"dtype=float16: model\.layers\.1\S* computes numbers of up to .*65,504.*use dtype=bfloat16 or dtype=float32"
    )
    for factor in (1, 10):  # near the end, and beyond it
        model = large_model()
        model.model.layers[1].mlp.down_proj.weight.data *= factor
        with pytest.raises(UnsupportedModel, match=message):
            verify_model(model.half(), block_size=4, kv_dtype=torch.float16)
    verify_model(large_model().to(torch.bfloat16), block_size=4, kv_dtype=torch.bfloat16)


def test_type_of_the_checkpoint_is_not_refused():
    verify_model(large_model().half(), block_size=4, kv_dtype=torch.float16, trained_dtype=torch.float16)


@pytest.mark.parametrize("window", [0, -1])
def test_window_below_one_is_named(tmp_path, window):
    save(hf.MistralConfig(**COMMON, sliding_window=window), tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"sliding_window={window} in its configuration: must be at least 1"):
        tiny_assembly(tmp_path)


def test_window_missing_from_attention_is_rejected(tmp_path, monkeypatch):
    """A short prompt cannot detect a long window, so the windows of masks and layers must agree."""
    save(hf.MistralConfig(**COMMON, sliding_window=64), tmp_path)
    tiny_assembly(tmp_path)
    attend = AttentionProbe.attend

    def attend_without_window(self, *args, sliding_window=None, **rest):
        return attend(self, *args, **rest)

    monkeypatch.setattr(AttentionProbe, "attend", attend_without_window)
    with pytest.raises(UnsupportedModel, match="windows 64, but its layers pass none"):
        tiny_assembly(tmp_path)


def test_quantized_activations_use_quantization_tolerance(tmp_path, monkeypatch):
    """torchao, bitsandbytes and compressed-tensors round activations like this; none of them is installed."""
    model = save_tiny(CONFIG, tmp_path)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(round_activations)
    with pytest.raises(UnsupportedModel, match="logits at position"):
        verify_model(model, block_size=4, kv_dtype=torch.float32)
    monkeypatch.setattr(model.config, "quantization_config", {"quant_method": "some"}, raising=False)
    assert len(verify_model(model, block_size=4, kv_dtype=torch.float32)) == 2


def round_activations(module, arguments):
    scale = arguments[0].abs().amax() / 127  # over all rows, so that a row depends on the others
    return ((arguments[0] / scale).round() * scale,)


class NoisyWeights:
    """A quantizer whose weights of files differ from the model's by some noise."""

    description, bits, int8_rows = "noisy weights", None, False

    def __init__(self, noise):
        self.noise, self.replaced = noise, []

    def __call__(self, weight):
        self.replaced.append(weight)
        generator = torch.Generator().manual_seed(len(self.replaced))
        return weight * (1 + self.noise * torch.randn(weight.shape, generator=generator)).to(weight.dtype)


@pytest.mark.parametrize(("noise", "is_used"), [(0.0003, True), (0.002, False)])
def test_stored_weights_may_differ_from_rounded_ones(tmp_path, caplog, noise, is_used):
    """The model's weights are rounded to its data type. A model that differs too much runs with its own weights."""
    caplog.set_level("INFO", "paged_llm")
    model = save_tiny(CONFIG, tmp_path)
    verify_model(model, block_size=4, kv_dtype=torch.float32, quantizer=NoisyWeights(noise))
    assert ("LlamaForCausalLM runs fused, with noisy weights" in caplog.text) == is_used
    assert ("fused, with noisy weights: logits at position" in caplog.text) != is_used


def test_a_copy_that_does_not_fit_is_left_out_with_a_warning(caplog, monkeypatch):
    copy, calls = verification.shallow_copy, []

    def copy_in_own_dtype(model, indices, dtype):
        calls.append(dtype)
        if dtype == torch.float32:
            raise torch.OutOfMemoryError
        return copy(model, indices, dtype)

    monkeypatch.setattr(verification, "shallow_copy", copy_in_own_dtype)
    verify_model(sensitive_model(), block_size=4, kv_dtype=torch.bfloat16)
    assert torch.float32 in calls
    assert "only the whole model is verified: not enough memory for a copy of" in caplog.text
