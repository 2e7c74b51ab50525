"""Tiny configurations of the model architectures that tests serve."""

import transformers as hf

from paged_backend.models.decoder import FusedDecoder

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


SMALL = {"vocab_size": 320, "n_positions": 256, "n_embd": 64, "n_layer": 3, "n_head": 4}  # names of GPT-2


# With tied and scaled embeddings, a random model repeats its last token, whatever attention computes.
UNTIED = {"tie_word_embeddings": False}


MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [2.0 + index for index in range(8)],
}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


LATENT = COMMON | {  # multi-head latent attention, and a mixture of experts from the second layer on
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}


FAMILIES = {
    "llama": lambda: hf.LlamaConfig(**COMMON),
    "llama_mha_odd_head": lambda: hf.LlamaConfig(**COMMON | {"num_key_value_heads": 4, "head_dim": 40}),
    "llama_mqa": lambda: hf.LlamaConfig(**COMMON | {"num_key_value_heads": 1}),
    "qwen2": lambda: hf.Qwen2Config(**COMMON),
    "qwen2_window": lambda: hf.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": lambda: hf.Qwen3Config(**COMMON, head_dim=32),
    "mistral_window": lambda: hf.MistralConfig(**COMMON, sliding_window=7),
    "smollm3": lambda: hf.SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1]),
    "gemma2": lambda: hf.Gemma2Config(
        **COMMON,
        **UNTIED,
        head_dim=32,
        sliding_window=7,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=5.0,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **COMMON, **UNTIED, head_dim=32, sliding_window=7, query_pre_attn_scalar=32, layer_types=MIXED
    ),
    "llama_dynamic_rope": lambda: hf.LlamaConfig(
        **COMMON | {"max_position_embeddings": 56}, rope_parameters=dict(DYNAMIC)
    ),
    "gemma3_dynamic_rope": lambda: hf.Gemma3TextConfig(
        **COMMON | {"max_position_embeddings": 56},
        **UNTIED,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=7,
        layer_types=MIXED,
        rope_parameters={kind: dict(DYNAMIC) for kind in set(MIXED)},
    ),
    "phi3_longrope": lambda: hf.Phi3Config(
        **COMMON, original_max_position_embeddings=56, rope_parameters=dict(LONGROPE)
    ),
    "phi3": lambda: hf.Phi3Config(**COMMON),
    "phi3_window": lambda: hf.Phi3Config(**COMMON, sliding_window=7),
    "gpt2": lambda: hf.GPT2Config(**SMALL, bos_token_id=1, eos_token_id=2),
    "opt": lambda: hf.OPTConfig(
        **{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}, ffn_dim=96, word_embed_proj_dim=64
    ),
    "olmo2": lambda: hf.Olmo2Config(**COMMON),
    "olmo3": lambda: hf.Olmo3Config(**COMMON, sliding_window=7, layer_types=MIXED),
    "starcoder2": lambda: hf.Starcoder2Config(**COMMON, sliding_window=7),
    "granite": lambda: hf.GraniteConfig(**COMMON, attention_multiplier=0.2, logits_scaling=2.0),
    "cohere2": lambda: hf.Cohere2Config(**COMMON, sliding_window=7, layer_types=MIXED),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}),
    "mixtral": lambda: hf.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=48
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **COMMON, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(**LATENT, q_lora_rank=None, topk_method="greedy", n_group=None),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**LATENT, q_lora_rank=24, n_group=2, topk_group=1),
    "deepseek_v3_yarn": lambda: hf.DeepseekV3Config(
        **LATENT, q_lora_rank=None, n_group=1, topk_group=1, rope_parameters=dict(YARN)
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **COMMON, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=7, layer_types=MIXED
    ),
}


HYBRID = COMMON | {"num_hidden_layers": 4}
LINEAR = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
DELTA_NET = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": LINEAR,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
}
SHARED_EXPERTS = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
MAMBA_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Models with recurrent layers. Mamba models have no layer with attention.
HYBRID_FAMILIES = {
    "bamba": lambda: hf.BambaConfig(**HYBRID, **MAMBA2, attn_layer_indices=[1, 3]),
    "falcon_h1": lambda: hf.FalconH1Config(**HYBRID, **MAMBA2 | {"mamba_d_ssm": 128}, ssm_out_multiplier=0.7),
    "falcon_mamba": lambda: hf.FalconMambaConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=3, state_size=4, **MAMBA_IDS
    ),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **HYBRID,
        **MAMBA2,
        layer_types=LINEAR,
        num_local_experts=4,
        shared_intermediate_size=48,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "granitemoehybrid_rope": lambda: hf.GraniteMoeHybridConfig(
        **HYBRID,
        **MAMBA2,
        layer_types=LINEAR,
        num_local_experts=0,
        shared_intermediate_size=96,
        position_embedding_type="rope",
    ),
    "jamba": lambda: hf.JambaConfig(
        **HYBRID, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, num_experts=4, num_experts_per_tok=2
    ),
    "lfm2": lambda: hf.Lfm2Config(**HYBRID, layer_types=["conv", "full_attention", "conv", "conv"], conv_L_cache=3),
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(
        **HYBRID,
        **EXPERTS,
        moe_intermediate_size=48,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv", "conv"],
    ),
    "mamba": lambda: hf.MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=3, state_size=4, **MAMBA_IDS),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=16,
        state_size=8,
        n_groups=2,
        chunk_size=8,
        **MAMBA_IDS,
    ),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **{key: value for key, value in HYBRID.items() if key != "num_hidden_layers"},
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        head_dim=16,
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=48,
    ),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(
        **HYBRID, **{key: value for key, value in DELTA_NET.items() if key != "head_dim"}
    ),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**HYBRID, **DELTA_NET),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeTextConfig(
        **{key: value for key, value in HYBRID.items() if key != "intermediate_size"},
        **DELTA_NET,
        **EXPERTS,
        **SHARED_EXPERTS,
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**HYBRID, **DELTA_NET, **EXPERTS, **SHARED_EXPERTS),
}


# One or two for each kind of attention and position embedding. DEFAULT_HYBRIDS has recurrent layers of each kind. The
# other families are tested nightly.
DEFAULT_FAMILIES = (
    *("llama", "qwen2_window", "qwen3", "gemma2", "gemma3", "phi3_longrope", "gpt2", "mixtral", "deepseek_v3_yarn"),
    *("olmo2", "phi3", "gpt_oss", "lfm2", "qwen3_next"),
)


DEFAULT_HYBRIDS = ("falcon_h1", "jamba", "lfm2", "mamba2", "qwen3_next")  # one of each kind of mixer


def is_fused(model):
    """Return whether the decoder is a fused one."""
    return FusedDecoder.of(model) is not None


# Models that the verification at load rejects
REJECTED_FAMILIES = {
    "bloom": lambda: hf.BloomConfig(vocab_size=320, hidden_size=64, n_layer=2, n_head=4),
    "codegen": lambda: hf.CodeGenConfig(**SMALL, rotary_dim=8),
    "falcon": lambda: hf.FalconConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256
    ),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=320,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=256,
    ),
    "gptj": lambda: hf.GPTJConfig(**SMALL, rotary_dim=8),
    "llama4": lambda: hf.Llama4TextConfig(
        **COMMON, intermediate_size_mlp=96, num_local_experts=4, attention_chunk_size=8
    ),
    "mpt": lambda: hf.MptConfig(vocab_size=320, d_model=64, n_layers=2, n_heads=4),
    "nemotron": lambda: hf.NemotronConfig(**COMMON),
    "stablelm": lambda: hf.StableLmConfig(**COMMON),
}
ACCEPTED_SINCE = {"codegen": "5.24", "gptj": "5.24"}  # transformers, whose model then calls the attention interface
