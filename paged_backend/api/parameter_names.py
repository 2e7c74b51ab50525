"""Names that other engines have for sampling parameters, for errors that name the parameter of this engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from paged_backend.api.errors import closest_match

# vLLM, transformers, TensorRT-LLM and OpenAI's API: name there, parameters here.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "use_beam_search": ("beam_width",),
    "num_beams": ("beam_width",),
    "guided_json": ("json_schema",),
    "guided_json_object": ("json_object",),
    "guided_regex": ("regex",),
    "guided_choice": ("choice",),
    "guided_grammar": ("grammar",),
    "guided_whitespace_pattern": ("structured_outputs",),
    "ebnf": ("grammar",),
    "response_format": ("json_schema", "json_object"),
    "max_new_tokens": ("max_tokens",),
    "max_completion_tokens": ("max_tokens",),
    "max_output_tokens": ("max_tokens",),
    "max_length": ("max_tokens",),
    "min_new_tokens": ("min_tokens",),
    "min_length": ("min_tokens",),
    "stop_words": ("stop",),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "eos_token_id": ("stop_token_ids",),
    "random_seed": ("seed",),
    "do_sample": ("temperature",),
    "num_return_sequences": ("n",),
    "top_logprobs": ("logprobs",),
    "lora_request": ("lora_name",),
    "kv_transfer_params": ("prefill_only",),
    "do_remote_decode": ("prefill_only",),
}


def replacement(name: str, known: Collection[str]) -> str | None:
    """Return which of the known names to use instead of another engine's, as in `json_schema or json_object`."""
    names = [one for one in OTHER_NAMES.get(name, ()) if one in known]
    return " or ".join(names) or None


def suggestion(name: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """Return a hint for an unknown name, as in `use json_schema instead` or `did you mean top_p?`; None without one."""
    if instead := replacement(name, known):
        return f"use {instead} instead"
    near = closest_match(name, known, cutoff)
    return f"did you mean {near}?" if near else None
