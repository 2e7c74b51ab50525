"""Which models can be divided into stages, and that those that can give the same tokens."""

import pytest
import torch
import transformers as hf

from tests.support.in_process import running, save_tiny, tiny_assembly

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with GPUs the ranks would use them")

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

FAMILIES = {
    "llama": hf.LlamaConfig(**COMMON),
    "gemma3": hf.Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=8),
    "gemma2": hf.Gemma2Config(**COMMON, head_dim=16, sliding_window=8),
    "phi3": hf.Phi3Config(**COMMON, pad_token_id=0),
    "mixtral": hf.MixtralConfig(**COMMON, num_local_experts=4),
    "qwen2-windows": hf.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "olmo2": hf.Olmo2Config(**COMMON),
    "granite": hf.GraniteConfig(**COMMON, embedding_multiplier=2.0),
    "cohere": hf.CohereConfig(**COMMON),
    "deepseek_v3": hf.DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_shared_experts=1,
    ),
    "gpt_oss": hf.GptOssConfig(**COMMON, head_dim=16, num_local_experts=4, sliding_window=8),
}


def generate(directory, **options):
    assembly = tiny_assembly(directory, **options)
    try:
        with running(assembly) as engine:
            return engine.generate(PROMPTS, max_tokens=12)
    finally:
        assembly.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_match_a_single_process(family, tmp_path):
    save_tiny(FAMILIES[family], tmp_path)
    assert generate(tmp_path) == generate(tmp_path, pipeline_parallel_size=2)
