"""Configurations of popular checkpoints, with fewer layers and tokens: sizes, scales and positions are their own.

The numbers are those of the `config.json` of each, or the defaults of its class in transformers where these are its
own. Mixtures have fewer experts where all would not fit into the memory of a test machine.
"""

import transformers as hf

SHORT = {"vocab_size": 512, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LOCAL_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"]}


def llama3(**rest):
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factor = rest.pop("factor")
    return hf.LlamaConfig(
        **SHORT | rest,
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **scaling},
    )


def theta(value):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": float(value)}}


CHECKPOINTS = {
    "Llama-3.1-8B": lambda: llama3(hidden_size=4096, intermediate_size=14336, factor=8.0),
    "Llama-3.2-1B": lambda: llama3(
        hidden_size=2048, intermediate_size=8192, head_dim=64, factor=32.0, tie_word_embeddings=True
    ),
    "Qwen2.5-7B": lambda: hf.Qwen2Config(
        **SHORT, hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4,
        max_position_embeddings=32768, rms_norm_eps=1e-6, **theta(1e6),
    ),
    "Qwen3-8B": lambda: hf.Qwen3Config(
        **SHORT, hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, rms_norm_eps=1e-6, **theta(1e6),
    ),
    "Qwen3-30B-A3B": lambda: hf.Qwen3MoeConfig(
        **SHORT, hidden_size=2048, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=32, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        max_position_embeddings=40960, rms_norm_eps=1e-6, **theta(1e6),
    ),
    "Qwen3-Next-80B-A3B": lambda: hf.Qwen3NextConfig(
        **SHORT, num_experts=32, layer_types=["linear_attention", "full_attention"]
    ),
    "Qwen3.5": lambda: hf.Qwen3_5TextConfig(**SHORT, layer_types=["linear_attention", "full_attention"]),
    "Mistral-7B-v0.1": lambda: hf.MistralConfig(
        **SHORT, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=32768, rms_norm_eps=1e-5, sliding_window=4096, **theta(1e4),
    ),
    "Mistral-Small-24B": lambda: hf.MistralConfig(
        **SHORT, hidden_size=5120, intermediate_size=32768, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=32768, rms_norm_eps=1e-5, sliding_window=None, **theta(1e8),
    ),
    "Mixtral-8x7B": lambda: hf.MixtralConfig(
        **SHORT | {"num_hidden_layers": 1}, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5, **theta(1e6),
    ),
    "Gemma-2-9B": lambda: hf.Gemma2Config(
        **SHORT, **LOCAL_GLOBAL, hidden_size=3584, intermediate_size=14336, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    ),
    "Gemma-3-4B": lambda: hf.Gemma3TextConfig(
        **SHORT, **LOCAL_GLOBAL, hidden_size=2560, intermediate_size=10240, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, sliding_window=1024, query_pre_attn_scalar=256,
    ),
    "Gemma-4-E2B": lambda: hf.Gemma4TextConfig(
        **SHORT | {"num_hidden_layers": 4}, layer_types=["sliding_attention", "full_attention"] * 2, hidden_size=1536,
        intermediate_size=6144, num_attention_heads=8, num_key_value_heads=1, sliding_window=512,
        num_kv_shared_layers=2, use_double_wide_mlp=True, vocab_size_per_layer_input=512, final_logit_softcapping=30.0,
    ),
    "Phi-4": lambda: hf.Phi3Config(
        **SHORT, hidden_size=5120, intermediate_size=17920, num_attention_heads=40, num_key_value_heads=10,
        max_position_embeddings=16384, rms_norm_eps=1e-5, **theta(250000),
    ),
    "gpt-oss-20B": lambda: hf.GptOssConfig(**SHORT | {"num_local_experts": 8}, **LOCAL_GLOBAL),
    "DeepSeek-V2-Lite": lambda: hf.DeepseekV2Config(
        **SHORT, hidden_size=2048, intermediate_size=10944, num_attention_heads=16, num_key_value_heads=16,
        kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        n_routed_experts=32, num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2,
        first_k_dense_replace=1, topk_method="greedy", n_group=1, topk_group=1,
    ),
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(
        **SHORT | {"num_hidden_layers": 1}, first_k_dense_replace=0, n_routed_experts=16, n_group=8, topk_group=4
    ),
    "OLMo-2-7B": lambda: hf.Olmo2Config(
        **SHORT, hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32,
        max_position_embeddings=4096, rms_norm_eps=1e-6, **theta(500000),
    ),
    "OLMo-3-7B": lambda: hf.Olmo3Config(
        **SHORT, **LOCAL_GLOBAL, hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=8192, sliding_window=4096, rms_norm_eps=1e-6, **theta(500000),
    ),
    "Granite-3.3-8B": lambda: hf.GraniteConfig(
        **SHORT, hidden_size=4096, intermediate_size=12800, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=131072, rms_norm_eps=1e-5, embedding_multiplier=12.0, attention_multiplier=0.0078125,
        residual_multiplier=0.22, logits_scaling=16.0, tie_word_embeddings=True, **theta(1e7),
    ),
    "Falcon-H1-1.5B": lambda: hf.FalconH1Config(
        **SHORT, hidden_size=2048, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        mamba_d_ssm=3072, mamba_n_heads=48, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=256,
    ),
    "SmolLM3-3B": lambda: hf.SmolLM3Config(
        **SHORT, hidden_size=2048, intermediate_size=11008, num_attention_heads=16, num_key_value_heads=4,
        no_rope_layers=[1, 0], max_position_embeddings=65536, rms_norm_eps=1e-6, **theta(5e6),
    ),
    "Command-R7B": lambda: hf.Cohere2Config(
        **SHORT, **LOCAL_GLOBAL, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, sliding_window=4096, logit_scale=0.25, **theta(50000),
    ),
    "LFM2-1.2B": lambda: hf.Lfm2Config(
        **SHORT, hidden_size=2048, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8,
        layer_types=["conv", "full_attention"], **theta(1e6),
    ),
    "StarCoder2-3B": lambda: hf.Starcoder2Config(
        **SHORT, hidden_size=3072, intermediate_size=12288, num_attention_heads=24, num_key_value_heads=2,
        max_position_embeddings=16384, sliding_window=4096, use_bias=True, **theta(999999),
    ),
}  # fmt: skip
