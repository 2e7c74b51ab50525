"""Load sentence encoders: their pooling, context length and weights, from the files of sentence-transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModel,
    PretrainedConfig,
    PreTrainedModel,
)

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.options import invalid_option
from paged_backend.loading import model_files
from paged_backend.loading.load_progress import weights_reported
from paged_backend.loading.model_files import CONFIG
from paged_backend.loading.model_source import source_arguments
from paged_backend.models.attention import UnsupportedModel
from paged_backend.models.encoder import POOLINGS, Encoder

log = logging.getLogger("paged_llm")

# Files of sentence-transformers.
MODULES, SETTINGS = "modules.json", ("sentence_bert_config.json", "sentence_roberta_config.json")
DEFAULT_POOLING = "mean"  # of sentence-transformers for a model without its files
PADDING_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # of the length of an embedding
NEW_MODE = "pooling_mode"  # of newer versions of sentence-transformers, instead of a flag for each mode
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
UNUSED_WEIGHTS = ("pooler.", "cls.", "lm_head.")  # beginnings of weights of heads, which embeddings do not use

# Options that cannot be honored, and when they ask for something.
EXCLUDED: dict[str, Callable[[EngineConfig], bool]] = {
    "quantization": lambda config: config.quantization is not None,
    "kv_cache_dtype": lambda config: config.kv_cache_dtype != "auto",
    "batch_invariant": lambda config: config.batch_invariant,
    "enable_lora": lambda config: config.enable_lora,
    "num_speculative_tokens": lambda config: config.num_speculative_tokens > 0,
    "classifier_from_token": lambda config: config.classifier_from_token is not None,
    "disk_cache_dir": lambda config: config.disk_cache_dir is not None,
    "remote_cache_url": lambda config: config.remote_cache_url is not None,
    "tensor_parallel_size": lambda config: config.tensor_parallel_size > 1,
    "pipeline_parallel_size": lambda config: config.pipeline_parallel_size > 1,
}


def is_encoder(hf_config: PretrainedConfig) -> bool:
    """Return whether the files hold an encoder."""
    is_decoder = getattr(hf_config, "is_decoder", False) or type(hf_config) not in MODEL_FOR_MASKED_LM_MAPPING
    return not is_decoder and not getattr(hf_config, "is_encoder_decoder", False)


def check_options(config: EngineConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for an option that was set and that encoders do not support."""
    for option, is_set in EXCLUDED.items():
        if is_set(config):
            problem = f"not supported for {json.dumps(hf_config.model_type)}, which is an encoder; leave it out"
            raise invalid_option(option, getattr(config, option), problem)


def load_encoder(
    config: EngineConfig, hf_config: PretrainedConfig, path: Path, dtype: torch.dtype, device: torch.device
) -> tuple[Encoder, str]:
    """Return the encoder and the name of its pooling. Raises ConfigError."""
    if getattr(hf_config, model_files.QUANTIZATION, None) is not None:
        raise ConfigError(f"{path / CONFIG}: quantized weights are not supported for an encoder")
    pooling = read_pooling(path)
    if config.load_format == "dummy":
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            layers = AutoModel.from_config(hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code)
    else:
        layers = _load_weights(config, hf_config, path, dtype)
    return Encoder(layers.to(device), pooling).eval(), pooling


def _load_weights(config: EngineConfig, hf_config: PretrainedConfig, path: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with weights_reported():
            layers, info = AutoModel.from_pretrained(
                **source_arguments(path),
                config=hf_config,
                dtype=dtype,
                trust_remote_code=config.trust_remote_code,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                use_safetensors=True,
            )
    except Exception as error:  # e.g. a truncated file
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model={json.dumps(config.model)}: cannot be loaded from {path}: {reason}") from error
    used = {
        field: [key for key in info[field] if not key.startswith(UNUSED_WEIGHTS)]
        for field in ("missing_keys", "unexpected_keys")
    }
    model_files.check_loading_info(path, {**info, **used}, quantized=False)
    return layers


def read_pooling(path: Path) -> str:
    """Return how the model's hidden states become an embedding, a key of `POOLINGS`. Raises ConfigError for modules
    that are not supported."""
    file = path / MODULES
    if not file.exists():
        log.info("%s: no %s, so embeddings are the %s of hidden states", path, MODULES, DEFAULT_POOLING)
        return DEFAULT_POOLING
    try:
        modules = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in json.loads(file.read_bytes())]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file}: not a list of modules: {type(error).__name__}: {error}") from error
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(f"{file}: modules {json.dumps(kinds)}: must be Transformer, Pooling and perhaps Normalize")
    directory = modules[1][1]
    if Path(directory).name != directory:
        raise ConfigError(f"{file}: path={json.dumps(directory)}: must be a directory beside this file")
    file = path / directory / CONFIG
    settings = model_files.read_object(file)
    flags = [mode for flag, mode in MODES.items() if settings.get(flag)]
    modes = [settings[NEW_MODE]] if NEW_MODE in settings else flags
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ConfigError(f"{file}: pooling {json.dumps(modes)}: must be one of {', '.join(POOLINGS)}")
    return str(modes[0])


def context_length(config: EngineConfig, path: Path, encoder: Encoder) -> tuple[int, int]:
    """Return the longest prompt, and the longest that the model supports, in tokens. Raises ConfigError.

    A prompt is computed in one step. Without `max_model_len` it is the length of the files of sentence-transformers."""
    longest, step = _num_positions(encoder.base_model.layers), config.max_num_batched_tokens
    wanted = config.max_model_len
    if wanted is None:
        trained = min(longest, _trained_length(path) or longest)
        if step < trained:
            log.warning("max_num_batched_tokens=%d limits prompts, of which the encoder supports %d", step, trained)
        return min(trained, step), longest
    if wanted > longest:
        raise ConfigError(f"max_model_len={wanted}: must be at most {longest}, the encoder's number of positions")
    if wanted > step:
        raise ConfigError(
            f"max_model_len={wanted}: must be at most max_num_batched_tokens={step}, because an encoder computes a"
            " prompt in one step"
        )
    return wanted, longest


def _trained_length(path: Path) -> int | None:
    for name in SETTINGS:
        if (path / name).exists():
            value = model_files.read_object(path / name).get("max_seq_length")
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{path / name}: max_seq_length={json.dumps(value)}: must be a positive number")
            return value
    return None


def _num_positions(layers: PreTrainedModel) -> int:
    """Return the longest prompt that a model has positions for. Models like RoBERTa count them from after their padding
    token."""
    for name, module in layers.named_modules():
        if name.rpartition(".")[2] == "position_embeddings" and isinstance(module, torch.nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    limit: Any = getattr(layers.config, "max_position_embeddings", None)
    if limit is None:
        raise UnsupportedModel(f"{type(layers).__name__}: its configuration does not limit the length of a prompt")
    return int(limit)


@torch.inference_mode()
def verify_encoder(encoder: Encoder, long: list[int]) -> None:
    """Raise UnsupportedModel if an embedding is not finite, or depends on the padding that a longer prompt causes.
    long: token ids of a prompt."""
    name, dtype = type(encoder.base_model.layers).__name__, encoder.dtype
    both = [torch.tensor(ids, device=encoder.device) for ids in (long, long[: len(long) // 2])]
    try:
        alone, padded = encoder.base_model.embed(both[1:])[0], encoder.base_model.embed(both)
    except Exception as error:  # e.g. an encoder without the argument attention_mask
        raise UnsupportedModel(f"{name} cannot be served: {type(error).__name__}: {error}") from error
    if not (alone.isfinite().all() and padded.isfinite().all()):
        raise UnsupportedModel(f"{name} cannot be served: its embeddings in {dtype} are not finite; use another dtype")
    difference, allowed = float((alone - padded[1]).norm() / alone.norm()), PADDING_TOLERANCE[dtype]
    if difference > allowed:
        raise UnsupportedModel(
            f"{name} cannot be served: beside a longer prompt, an embedding differs by {difference:.2g}"
            f" (allowed: {allowed})"
        )
