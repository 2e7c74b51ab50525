"""The tables of tensorrtllm_backend's tensors."""

from paged_backend.trtllm.tensors import BLS, CORE, ENSEMBLE, INPUTS, OUTPUTS


def test_text_models_match_tensorrtllm_backend_tensors():
    both = set(
        "text_input decoder_text_input max_tokens bad_words stop_words num_return_sequences end_id pad_id top_k top_p"
        " temperature length_penalty repetition_penalty min_tokens min_length presence_penalty frequency_penalty seed"
        " random_seed return_log_probs return_context_logits return_generation_logits return_perf_metrics"
        " return_num_input_tokens return_num_output_tokens beam_width stream exclude_input_in_output"
        " prompt_embedding_table prompt_vocab_size prompt_table_extra_id embedding_bias_words embedding_bias_weights"
        " lora_task_id lora_weights lora_config guided_decoding_guide_type guided_decoding_guide".split()
    )
    assert set(INPUTS[ENSEMBLE]) == both
    assert set(INPUTS[BLS]) - both == {
        "image_input", "image_bytes_input", "image_url_input", "video_bytes_input", "num_draft_tokens",
        "use_draft_logits",
    }  # fmt: skip
    assert [name for name, one in INPUTS[BLS].items() if one.required] == ["text_input", "max_tokens"]
    assert (
        set(OUTPUTS[BLS])
        == set(OUTPUTS[ENSEMBLE])
        == set(
            "text_output cum_log_probs output_log_probs context_logits generation_logits batch_index sequence_index"
            " kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks arrival_time_ns"
            " first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate"
            " total_accepted_draft_tokens total_draft_tokens num_input_tokens num_output_tokens".split()
        )
    )
    assert {"output_ids", "sequence_length"} < set(OUTPUTS[CORE])


def test_inputs_without_a_counterpart_are_refused():
    """tests/trtllm/test_rows.py shows how."""
    known = {name: one for table in INPUTS.values() for name, one in table.items()}
    names = (
        "prompt_embedding_table prompt_vocab_size lora_weights lora_config return_context_logits"
        " return_generation_logits image_input image_bytes_input image_url_input video_bytes_input image_url"
        " num_draft_tokens use_draft_logits draft_input_ids draft_logits beam_search_diversity_rate"
        " retention_token_range_starts retention_decode_priority encoder_input_features cross_attention_mask"
        " lookahead_window_size"
    )
    assert [name for name in names.split() if not known[name].unsupported] == []
