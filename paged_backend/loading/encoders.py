"""Load sentence encoders: their pooling, context length and weights, from the files of sentence-transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel

from paged_backend.api.errors import ConfigError
from paged_backend.files import model_files
from paged_backend.files.model_files import CONFIG, MODULES
from paged_backend.loading import model_sizes
from paged_backend.loading.load_progress import weights_reported
from paged_backend.loading.model_source import ModelSource, source_arguments
from paged_backend.loading.weights import load_errors_named
from paged_backend.models.attention import UnsupportedModel
from paged_backend.models.encoder import POOLINGS, Encoder

log = logging.getLogger("paged_llm")

# Files of sentence-transformers.
SETTINGS, PROMPTS = "sentence_*_config.json", "config_sentence_transformers.json"
DEFAULT_POOLING = "mean"  # of sentence-transformers for a model without its files
# Maximum change of an embedding, relative to its length, when the padding has other tokens. Padding is masked.
CONTENT_TOLERANCE = 1e-4
# The same when the padding has another length, which changes how numbers are rounded.
PADDING_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
NEW_MODE = "pooling_mode"  # field of newer versions of sentence-transformers, instead of a flag for each mode
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
POOLER = "pooler."  # beginning of the names of weights that embeddings do not use


def is_encoder(hf_config: PretrainedConfig) -> bool:
    """Return whether a configuration describes an encoder."""
    is_decoder = getattr(hf_config, "is_decoder", False) or type(hf_config) not in MODEL_FOR_MASKED_LM_MAPPING
    return not is_decoder and not getattr(hf_config, "is_encoder_decoder", False)


def load_encoder(source: ModelSource, dtype: torch.dtype, device: torch.device) -> tuple[Encoder, str]:
    """Return the encoder and the name of its pooling. Raises ConfigError."""
    hf_config, path = source.hf_config, source.path
    if getattr(hf_config, model_files.QUANTIZATION, None) is not None:
        raise ConfigError(f"{path / CONFIG}: quantized weights are not supported for an encoder")
    if getattr(hf_config, "attention_type", None) == "block_sparse":  # after a short prompt, BigBird changes it
        raise ConfigError(f'{path / CONFIG}: attention_type="block_sparse": not supported; set it to "original_full"')
    pooling = read_pooling(path)
    _check_prompts(path)
    if source.dummy_seed is not None:
        with torch.random.fork_rng():
            torch.manual_seed(source.dummy_seed)
            layers = AutoModel.from_config(hf_config, dtype=dtype, trust_remote_code=source.trust_remote_code)
    else:
        layers = _load_weights(source, dtype)
    return Encoder(layers.to(device), pooling).eval(), pooling


def _load_weights(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    path = source.path
    with load_errors_named(source), weights_reported():
        layers, info = AutoModel.from_pretrained(
            **source_arguments(path),
            config=source.hf_config,
            dtype=dtype,
            trust_remote_code=source.trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            use_safetensors=True,
        )
    missing = [key for key in info["missing_keys"] if not key.startswith(POOLER)]
    model_sizes.check_loading_info(path, {**info, "missing_keys": missing, "unexpected_keys": []}, quantized=False)
    if heads := sorted(info["unexpected_keys"]):
        log.info("%s: %d weights of heads are not used, such as %s", path, len(heads), heads[0])
    return layers


def read_pooling(path: Path) -> str:
    """Return how the model's hidden states become an embedding, a key of `POOLINGS`. Raises ConfigError for modules
    that are not supported."""
    file = path / MODULES
    if not file.exists():
        log.info("%s: no %s, so embeddings are the %s of hidden states", path, MODULES, DEFAULT_POOLING)
        return DEFAULT_POOLING
    try:
        modules = [(str(part["type"]).rpartition(".")[2], str(part["path"])) for part in json.loads(file.read_bytes())]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{file}: not a list of modules: {type(error).__name__}: {error}") from error
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(f"{file}: modules {json.dumps(kinds)}: must be Transformer, Pooling and perhaps Normalize")
    (_, own), (_, directory), *_ = modules
    if own:
        raise ConfigError(f"{file}: path={json.dumps(own)} of Transformer: must be empty: the directory of this file")
    if Path(directory).name != directory or directory in ("", ".."):
        raise ConfigError(f"{file}: path={json.dumps(directory)} of Pooling: must be a directory beside this file")
    file = path / directory / CONFIG
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; {path / MODULES} names its directory")
    settings = model_files.read_object(file)
    flags = [mode for flag, mode in MODES.items() if settings.get(flag)]
    modes = [settings[NEW_MODE]] if NEW_MODE in settings else flags
    if len(modes) != 1 or modes[0] not in tuple(POOLINGS):
        raise ConfigError(f"{file}: pooling {json.dumps(modes)}: must be one of {', '.join(POOLINGS)}")
    return str(modes[0])


def context_length(wanted: int | None, step: int, path: Path, encoder: Encoder) -> tuple[int, int]:
    """Return the longest prompt, and the longest that the model supports, in tokens. Raises ConfigError.

    Args:
        wanted: the option `max_model_len`; None: the length in the files of sentence-transformers.
        step: the option `max_num_batched_tokens`. A prompt is computed in one step.
        path: the model's directory.
        encoder: the model.
    """
    longest = _num_positions(encoder.base_model.layers)
    if wanted is None:
        trained = min(longest, _trained_length(path) or longest)
        if step < trained:
            log.warning("max_num_batched_tokens=%d limits prompts, of which the encoder supports %d", step, trained)
        wanted = min(trained, step)
    if wanted < 2:
        raise ConfigError(f"{path}: describes an encoder for prompts of {wanted} tokens; must be at least 2")
    if wanted > longest:
        raise ConfigError(f"max_model_len={wanted}: must be at most {longest}, the encoder's number of positions")
    if wanted > step:
        raise ConfigError(
            f"max_model_len={wanted}: must be at most max_num_batched_tokens={step}, because an encoder computes a"
            " prompt in one step"
        )
    return wanted, longest


def _trained_length(path: Path) -> int | None:
    """Return the longest prompt that sentence-transformers would compute; None if its files have no limit."""
    for file in sorted(path.glob(SETTINGS)):
        settings = model_files.read_object(file)
        value = settings.get("max_seq_length")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 2):
            raise ConfigError(f"{file}: max_seq_length={json.dumps(value)}: must be a number of at least 2")
        if settings.get("do_lower_case"):
            raise ConfigError(
                f"{file}: do_lower_case=true: not supported; lower the text of requests, and set it to false"
            )
        return value
    return None


def _check_prompts(path: Path) -> None:
    """Warn of a prefix that sentence-transformers adds to each text."""
    settings = model_files.read_object(path / PROMPTS) if (path / PROMPTS).exists() else {}
    if name := settings.get("default_prompt_name"):
        log.warning("%s: default_prompt_name=%s: this prefix is not added to prompts", path / PROMPTS, json.dumps(name))


def _num_positions(layers: PreTrainedModel) -> int:
    """Return the longest prompt that a model has positions for. Models like RoBERTa count them from the id after
    their padding token's."""
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
    if max(long) >= encoder.config.vocab_size:
        raise UnsupportedModel(
            f"{name}: its tokenizer has the token {max(long)}; vocab_size={encoder.config.vocab_size}"
        )
    embed = encoder.base_model.embed
    both = [torch.tensor(ids, device=encoder.device) for ids in (long, long[: -(-len(long) // 2)])]
    try:
        alone, padded, other = embed(both[1:])[0], embed(both), embed(both, pad_id=long[0])
    except Exception as error:  # e.g. an encoder without the argument attention_mask
        raise UnsupportedModel(f"{name} cannot be served: {type(error).__name__}: {error}") from error
    if not (alone.isfinite().all() and padded.isfinite().all()):
        raise UnsupportedModel(f"{name} cannot be served: its embeddings in {dtype} are not finite; use another dtype")
    length = alone.norm()
    for reference, allowed in ((other[1], CONTENT_TOLERANCE), (alone, PADDING_TOLERANCE[dtype])):
        difference = float((padded[1] - reference).norm() / length)
        if difference > allowed:
            raise UnsupportedModel(
                f"{name} cannot be served: beside a longer prompt, an embedding differs by {difference:.2g}"
                f" (allowed: {allowed})"
            )
