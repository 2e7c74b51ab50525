"""Names that other engines have for options and sampling parameters, so that their configurations and clients work.

A name that this engine does not have is accepted with a value that changes nothing here, and otherwise rejected with
what to use instead. Nothing is ignored without a message.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from paged_backend.api.errors import closest_match, invalid_argument


class Unsupported(NamedTuple):
    """An option or parameter that exists only for values without effect."""

    accepted: tuple[Any, ...]  # besides null
    reason: str = ""  # why other values are rejected, and what to set instead

    def accepts(self, value: Any) -> bool:
        """Return whether a value changes nothing. It may be a string that spells the value: "false" is false."""
        value = _value(value.lower()) if isinstance(value, str) else value
        return value is None or any(
            value == accepted and isinstance(value, bool) == isinstance(accepted, bool) for accepted in self.accepted
        )


EMPTY: tuple[Any, ...] = ("", {}, [])


def _read(table: str) -> dict[str, Unsupported]:
    """Read a table of names. Indented lines list the names that the reason above them applies to.

    `name=a|b` is accepted with these values, a name alone with empty ones.
    """
    entries: dict[str, Unsupported] = {}
    reason = ""
    for line in table.strip("\n").splitlines():
        if not line.startswith(" "):
            reason = line
            continue
        for entry in line.split():
            name, _, values = entry.partition("=")
            entries[name] = Unsupported(tuple(map(_value, values.split("|"))) if values else EMPTY, reason)
    return entries


def _value(text: str) -> Any:
    """Return the JSON value that a text spells, or else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# Engine arguments of vLLM (vllm/engine/arg_utils.py) from version 0.6 on, with its default if that has no effect here,
# or values that describe what this engine does. Options that both engines have are fields of EngineConfig.
VLLM_OPTIONS: Mapping[str, Unsupported] = _read("""
requests are not logged; leave it out
  disable_log_requests=false|true enable_log_requests=false max_log_len
a trace has one level of detail; leave it out
  collect_detailed_traces
weights are safetensors or GGUF files, which transformers reads one after the other; leave it out
  max_parallel_loading_workers ignore_patterns=original/**/*|["original/**/*"]|[] model_loader_extra_config
  qlora_adapter_name_or_path use_tqdm_on_load=true
the engine chooses which CUDA graphs it captures; set enforce_eager to capture none
  max_seq_len_to_capture=8192 cuda_graph_sizes cudagraph_capture_sizes max_cudagraph_capture_size
layers run fused kernels of this engine, which torch.compile does not speed up; leave it out
  compilation_config=0|{}
attention runs on this engine's own kernels, with cascade attention for shared prefixes; leave it out
  attention_backend=auto attention_config disable_cascade_attn=false
layers keep the keys and values that their attention can see, in one pool; leave it out
  disable_hybrid_kv_cache_manager=false|true disable_sliding_window=false use_v2_block_manager=false|true
cached blocks are found by comparing their tokens, not by a hash alone; leave it out
  prefix_caching_hash_algo=builtin|sha256
keys and values of 8 bits have a scale per token and head, which needs no calibration; leave it out
  calculate_kv_scales=false
set swap_space for host memory, disk_cache_dir for a disk
  kv_offloading_size=0 kv_offloading_backend=native
set remote_cache_url, and the sampling parameter prefill_only
  kv_transfer_config
weights stay on the device; leave it out
  cpu_offload_gb=0
`paged sleep` and `paged wake` need no option; leave it out
  enable_sleep_mode=false|true
prefill is always chunked; set max_num_batched_tokens and target_step_ms
  enable_chunked_prefill=true max_num_partial_prefills=1 max_long_partial_prefills=1 long_prefill_token_threshold=0
requests are admitted by priority, then in order of arrival; set fair_tenants for fairness between tenants
  scheduling_policy=fcfs|priority
the engine schedules one step at a time; set async_scheduling to overlap scheduling and computation
  num_scheduler_steps=1 multi_step_stream_outputs=false|true disable_async_output_proc=false stream_interval=1
images, audio and video are not supported
  limit_mm_per_prompt={}|{"image":0}|{"image":0,"video":0}|{"image":0,"video":0,"audio":0} mm_processor_kwargs
  mm_processor_cache_gb=0|4 disable_mm_preprocessor_cache=false|true allowed_local_media_path
a model generates text and embeddings, or classifies if its files have a head for it; leave it out
  runner=auto|generate|pooling convert=auto|none|embed|classify pooler_config override_pooler_config
  task=auto|generate|embed|embedding|classify|score
models, configurations and tokenizers are those of transformers; edit the model's files to change them
  config_format=auto|hf model_impl=auto|transformers tokenizer_mode=auto|hf skip_tokenizer_init=false hf_config_path
  hf_overrides rope_scaling rope_theta
code comes with the model, at its `revision`
  code_revision
set it in the environment, as HF_TOKEN
  hf_token
set tensor_parallel_size, pipeline_parallel_size or data_parallel_size to use several GPUs, and nnodes for several \
machines
  distributed_executor_backend=mp|uni worker_use_ray=false data_parallel_size_local=1 node_rank=0
  decode_context_parallel_size=1 disable_custom_all_reduce=false|true
the experts of a mixture are computed like every other layer; leave it out
  enable_expert_parallel=false enable_eplb=false
structured outputs are compiled by llguidance; set structured_outputs_timeout or disable_any_whitespace
  guided_decoding_backend=auto|guidance guided_decoding_disable_fallback=false structured_outputs_config
  guided_decoding_disable_any_whitespace=false guided_decoding_disable_additional_properties=false
log probabilities are the model's own, before temperature and penalties
  logprobs_mode=raw_logprobs
set num_speculative_tokens, speculative_model, prompt_lookup_min and prompt_lookup_max
  speculative_config
adapters are LoRA matrices of linear layers in the data type of the weights; leave it out
  lora_dtype=auto lora_extra_vocab_size=0|256 enable_lora_bias=false fully_sharded_loras=false
  enable_prompt_adapter=false
the tokenizer's files have the marks; requests set return_reasoning_content and return_tool_calls
  enable_reasoning=false reasoning_parser tool_call_parser
prompts are text or token ids, and plugins are not supported; leave it out
  enable_prompt_embeds=false logits_processors logits_processor_pattern
""")

# vLLM's nested options: fields with the values that change nothing, fields that are options here, and which of these
# options must be set, because it has no default here that would do what vLLM does without it.
_NESTED: Mapping[str, tuple[Mapping[str, tuple[Any, ...]], Mapping[str, str], str | None]] = {
    "speculative_config": (
        {"method": (None, "ngram", "draft_model")},
        {"model": "speculative_model"}
        | {name: name for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")},
        "num_speculative_tokens",
    ),
    "structured_outputs_config": (
        {"backend": (None, *VLLM_OPTIONS["guided_decoding_backend"].accepted)},
        {"disable_any_whitespace": "disable_any_whitespace"},
        None,
    ),
}


def flatten_vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace vLLM's nested options by the options of this engine that they set.

    A nested option is kept, and will be rejected, if it sets something else, sets an option that is also set directly,
    or lacks an option that it needs.
    """
    flat = dict(options)
    for nested, (ignored, names, needed) in _NESTED.items():
        values = options.get(nested)
        if not isinstance(values, Mapping) or values.keys() - ignored.keys() - names.keys():
            continue
        changes_nothing = all(values.get(name) in accepted for name, accepted in ignored.items())
        own = {names[name]: value for name, value in values.items() if name in names}
        if values and needed and needed not in values.keys() | options.keys():
            continue
        if changes_nothing and not own.keys() & options.keys():
            del flat[nested]
            flat |= own
    return flat


def vllm_option_problem(name: str, value: Any) -> str | None:
    """Return what the value of an option in VLLM_OPTIONS must be, and why; None if the value changes nothing."""
    option = VLLM_OPTIONS[name]
    if option.accepts(value):
        return None
    values = " or ".join(json.dumps(accepted) for accepted in (*option.accepted, None) if accepted not in EMPTY)
    return f"must be {values}: {option.reason}"


# Sampling parameters of vLLM that some clients send although they have no effect.
UNSUPPORTED_PARAMETERS: Mapping[str, Unsupported] = _read("""
  use_beam_search=false detokenize=true spaces_between_special_tokens=true flat_logprobs=false
  skip_reading_prefix_cache=false logits_processors=[] extra_args={}
""")

# Sampling parameters here: their names in vLLM, transformers, TensorRT-LLM and OpenAI's API.
_PARAMETERS = {
    "beam_width": "use_beam_search num_beams",
    "json_schema": "guided_json response_format",
    "json_object": "guided_json_object response_format",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar ebnf",
    "structured_outputs": "guided_whitespace_pattern",
    "max_tokens": "max_new_tokens max_completion_tokens max_output_tokens max_length",
    "min_tokens": "min_new_tokens min_length",
    "stop": "stop_words stop_sequences stop_strings",
    "stop_token_ids": "eos_token_id",
    "thinking_token_budget": "max_thinking_tokens thinking_budget reasoning_budget",
    "seed": "random_seed",
    "temperature": "do_sample",
    "n": "num_return_sequences",
    "logprobs": "top_logprobs",
    "lora_name": "lora_request",
    "prefill_only": "kv_transfer_params do_remote_decode",
}


def own_names(name: str, known: Collection[str] = _PARAMETERS) -> list[str]:
    """Return which of the known sampling parameters are the parameter `name` of another engine."""
    return [own for own, others in _PARAMETERS.items() if own in known and name in others.split()]


def replacement(name: str, known: Collection[str] = _PARAMETERS) -> str | None:
    """Return which of the known names to use instead of another engine's, as in `json_schema or json_object`."""
    return " or ".join(own_names(name, known)) or None


def suggestion(name: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """Return a hint for an unknown name, as in `use json_schema instead` or `did you mean top_p?`; None without one."""
    if instead := replacement(name, known):
        return f"use {instead} instead"
    near = closest_match(name, known, cutoff)
    return f"did you mean {near}?" if near else None


def check_parameter(name: str, value: Any) -> None:
    """Raise RequestError if one of UNSUPPORTED_PARAMETERS has a value that would have an effect."""
    if not UNSUPPORTED_PARAMETERS[name].accepts(value):
        instead = replacement(name)
        raise invalid_argument(name, value, f"not supported; {f'use {instead} instead' if instead else 'leave it out'}")
