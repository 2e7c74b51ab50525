"""Which models can be divided into stages, and that those that can give the same tokens."""

import json
import logging
from importlib.util import find_spec

import pytest
import transformers as hf
from transformers import core_model_loading

from paged_backend.api.errors import ConfigError
from paged_backend.loading import description
from tests.support.in_process import running, save_tiny, tiny_assembly

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        find_spec("transformers.distributed.pipeline_parallel") is None,
        reason="this version of transformers loads no stages",
    ),
]

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = [list(range(1, 30)), [5, 6, 7], list(range(40, 57)), [8]]

DEEPSEEK = COMMON | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_shared_experts": 1,
}
WINDOW = {"head_dim": 16, "sliding_window": 8}
FAMILIES = {
    "llama": hf.LlamaConfig(**COMMON),
    "gemma3": hf.Gemma3TextConfig(**COMMON, **WINDOW),  # layers with and without windows, not fused
    "deepseek_v3": hf.DeepseekV3Config(**DEEPSEEK),  # latent attention, a dense layer in the first stage only
}
MORE_FAMILIES = {
    "gemma2": hf.Gemma2Config(**COMMON, **WINDOW),
    "phi3": hf.Phi3Config(**COMMON, pad_token_id=0),
    "mixtral": hf.MixtralConfig(**COMMON, num_local_experts=4),
    # Only the layers of the second stage have windows.
    "qwen2": hf.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "olmo2": hf.Olmo2Config(**COMMON),
    "cohere": hf.CohereConfig(**COMMON),
    "gpt_oss": hf.GptOssConfig(**COMMON, **WINDOW, num_local_experts=4),
}


def generate(directory, **options):
    assembly = tiny_assembly(directory, **options)
    try:
        with running(assembly) as engine:
            return engine.generate(PROMPTS, max_tokens=12)
    finally:
        assembly.close()


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES | MORE_FAMILIES)
def test_families_match_a_single_process(name, tmp_path):
    save_tiny((FAMILIES | MORE_FAMILIES)[name], tmp_path)
    assert generate(tmp_path) == generate(tmp_path, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 3, "quantization": "int8", "kv_cache_dtype": "fp8"},
        pytest.param({"load_format": "dummy"}, marks=pytest.mark.nightly),
    ],
)
def test_options_match_a_single_process(options, tmp_path):
    save_tiny(FAMILIES["gemma3"], tmp_path)
    assert generate(tmp_path, **options) == generate(tmp_path, **options, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (hf.LlamaConfig(**COMMON), "pipeline_parallel_size=5: must be at most 4, the model's num_hidden_layers"),
        (
            hf.GPT2Config(n_embd=32, n_head=2, n_layer=6, vocab_size=320, n_positions=64),
            "pipeline_parallel_size=5: must be 1 for gpt2, which cannot be divided: GPT2LMHeadModel has transformer",
        ),
        (
            hf.MambaConfig(hidden_size=32, num_hidden_layers=6, vocab_size=320),
            "pipeline_parallel_size=5: must be 1 for mamba, which cannot be divided: MambaForCausalLM has recurrent",
        ),
    ],
)
def test_models_that_cannot_be_divided_are_rejected(config, message, tmp_path):
    save_tiny(config, tmp_path)
    with pytest.raises(ConfigError, match=message):
        tiny_assembly(tmp_path, pipeline_parallel_size=5)


def test_classifiers_and_quantized_weights_are_rejected(tmp_path):
    save_tiny(FAMILIES["llama"], tmp_path)
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    for more, reason in (
        ({"architectures": ["LlamaForSequenceClassification"]}, "a model that classifies"),
        ({"quantization_config": {"quant_method": "awq"}}, "a model whose files hold quantized weights"),
    ):
        path.write_text(json.dumps(plain | more))
        with pytest.raises(ConfigError, match=f"pipeline_parallel_size=2: must be 1 for {reason}"):
            tiny_assembly(tmp_path, pipeline_parallel_size=2)


def test_embeddings_that_the_decoder_scales_are_rejected(tmp_path):
    """A later stage would scale the hidden states."""
    save_tiny(hf.GraniteConfig(**COMMON, embedding_multiplier=2.0), tmp_path)
    message = "pipeline_parallel_size=2: must be 1 for GraniteForCausalLM: it changes the embeddings before the first"
    with pytest.raises(ConfigError, match=message):
        tiny_assembly(tmp_path, pipeline_parallel_size=2)


def test_old_versions_of_transformers_are_rejected(tmp_path, monkeypatch):
    save_tiny(FAMILIES["llama"], tmp_path)
    monkeypatch.setattr(description, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: must be 1 with this version of transformers"):
        tiny_assembly(tmp_path, pipeline_parallel_size=2)


@pytest.mark.nightly
def test_weights_of_other_stages_are_not_read(tmp_path, monkeypatch, caplog):
    """The summary at startup shows what each stage holds."""
    caplog.set_level(logging.INFO)
    whole = save_tiny(FAMILIES["llama"], tmp_path)
    read, materialize = [], core_model_loading._materialize_copy

    def counted(*arguments, **more):
        tensor = materialize(*arguments, **more)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(core_model_loading, "_materialize_copy", counted)
    assembly = tiny_assembly(tmp_path, pipeline_parallel_size=2)
    assembly.close()
    first = [whole.model.embed_tokens, *whole.model.layers[:2]]
    assert sum(read) == sum(parameter.numel() for module in first for parameter in module.parameters())
    assert "Pipeline: 2 stages: layers 0 to 1 (0.00 GiB and 0.00 GiB of KV cache), layers 2 to 3 (" in caplog.text
