"""What a model is according to its configuration and the headers of its files, before its weights are read."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.files import model_files
from paged_backend.files.config_fields import unsupported, unsupported_model
from paged_backend.files.generation_config import BUILT_IN
from paged_backend.files.model_files import CONFIG, GGUF, MODULES, WeightTotals
from paged_backend.files.start_checks import check_layers, draft_errors
from paged_backend.kv.cache_layout import CacheSpec
from paged_backend.loading import encoders, model_sizes
from paged_backend.loading.attention_probe import probe_layers
from paged_backend.loading.classifier import check_speculation, is_classifier
from paged_backend.loading.encoders import is_encoder
from paged_backend.loading.gguf_weights import read_quickly
from paged_backend.loading.model_options import (
    check_batch_invariance,
    check_quantization,
    pick_dtype,
    pick_kv_dtype,
    pick_max_model_len,
    quantization_spec,
)
from paged_backend.loading.model_sizes import described_model
from paged_backend.loading.model_source import find_files, read_config
from paged_backend.loading.quantized_checkpoint import check_method
from paged_backend.loading.shallow_copy import SHARED_LAYERS
from paged_backend.loading.weights import is_quantized
from paged_backend.models import tensor_parallel
from paged_backend.models.attention import UnsupportedModel
from paged_backend.models.latent_attention import find_latent_layers
from paged_backend.models.recurrent import recurrent_mixers
from paged_backend.utils.startup import Progress

log = logging.getLogger("paged_llm")

SCALE_BITS = 16  # of a group of quantized weights
# Modules of a model that can be divided: whatever else a model has may depend on layers of other stages.
DIVISIBLE_MODULES = frozenset({"model", "lm_head"})
DECODER_MODULES = frozenset({"embed_tokens", "layers", "norm", "rotary_emb", "rotary_emb_local"})


@dataclass(frozen=True, eq=False)
class Description:
    """A model that is not loaded."""

    path: Path  # a directory or a GGUF file
    hf_config: PretrainedConfig
    dtype: torch.dtype
    name: str  # of the model's class
    num_parameters: int
    num_read: int  # parameters that are multiplied, which those of a table of embeddings are not
    num_active: int  # those of them that one token is multiplied by: of the experts of a layer, the ones it selects
    weight_bytes: int  # in memory, about
    cache: CacheSpec | None = None  # None: an encoder, or a model whose layers only show once it is loaded
    draft: Description | None = None


def describe(config: EngineConfig, root: Path, device: torch.device) -> Description:
    """Return the description of the model that the options name. Raises ConfigError for one that cannot be loaded, as
    far as its configuration and the headers of its files show."""
    path = find_files(config.model, root, config, config.revision)
    with read_quickly(path):
        return describe_files(config, root, device, path)


def describe_files(config: EngineConfig, root: Path, device: torch.device, path: Path) -> Description:
    """Return the description of the model in these files, with its draft model."""
    progress = Progress("reading the configuration", 2)
    hf_config = check_config(config, path)
    progress.advance()
    if encoders.is_encoder(hf_config):
        dtype = pick_dtype(config.dtype, hf_config.dtype, device)
        model, totals = _model_of(config, hf_config, path, AutoModel)
        progress.advance()
        return _description(config, path, hf_config, dtype, model, totals)
    check_method(config, hf_config, path, device)
    check_quantization(config, hf_config, path, device)
    check_batch_invariance(config, hf_config, path, device)
    text_config = hf_config.get_text_config()
    dtype = pick_dtype(config.dtype, torch.bfloat16 if path.suffix == GGUF else text_config.dtype, device)
    max_model_len = pick_max_model_len(config.max_model_len, text_config)
    model, totals = _model_of(config, hf_config, path, AutoModelForCausalLM)
    described = _description(config, path, hf_config, dtype, model, totals)
    progress.advance()
    draft = None
    if config.speculative_model:
        options = draft_options(config, dtype, max_model_len)
        with draft_errors(config):
            draft = describe(options, root, device)
    cache = _cache_of(config, model.to(dtype), max_model_len)
    if cache and draft:
        cache = draft.cache and cache._replace(layers=cache.layers + draft.cache.layers)
    return replace(described, cache=cache, draft=draft)


def check_config(config: EngineConfig, path: Path) -> PretrainedConfig:
    """Return the model's configuration. Raises ConfigError if it is not supported, or not with these options."""
    hf_config = read_config(config, path)
    check_architecture(path, hf_config)
    check_speculation(config, hf_config)
    if encoders.is_encoder(hf_config):
        encoders.check_options(config, hf_config)
    tensor_parallel.check_model(config, hf_config)
    if config.pipeline_parallel_size > 1 and path.suffix == GGUF:
        raise ConfigError(f"pipeline_parallel_size={config.pipeline_parallel_size}: must be 1 for a GGUF file")
    _check_stages(config, hf_config)
    return hf_config


def draft_options(config: EngineConfig, dtype: torch.dtype, max_model_len: int) -> EngineConfig:
    """Return the options of the draft model, which has the data type and context length of the model."""
    assert config.speculative_model
    return replace(
        config,
        model=config.speculative_model,
        speculative_model=None,
        num_speculative_tokens=0,
        dtype=str(dtype).removeprefix("torch."),
        revision=None,
        tokenizer=None,
        generation_config=BUILT_IN,
        override_generation_config=None,
        chat_template=None,
        classifier_from_token=None,
        max_model_len=max_model_len,
        enable_lora=False,
        batch_invariant=False,  # drafts change no tokens
    )


def _model_of(
    config: EngineConfig, hf_config: PretrainedConfig, path: Path, kind: type
) -> tuple[PreTrainedModel, WeightTotals | None]:
    """Return the model without memory for its weights, and the totals of its files."""
    is_dummy = config.load_format == "dummy"
    totals = None if is_dummy else model_files.check_weights(path, quantized=is_quantized(hf_config))
    model = model_sizes.check_sizes(path, hf_config, totals, trust_remote_code=config.trust_remote_code, kind=kind)
    return model, totals


def _description(
    config: EngineConfig,
    path: Path,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    model: PreTrainedModel,
    totals: WeightTotals | None,
) -> Description:
    count = sum(parameter.numel() for parameter in model.parameters())
    nbytes = count * dtype.itemsize
    if totals and (totals.is_quantized or (is_quantized(hf_config) and path.suffix != GGUF)):
        nbytes = min(nbytes, totals.num_bytes)
    elif rounding := quantization_spec(config, dtype):
        table = model.get_input_embeddings().weight  # also that of an output layer, which then has a rounded copy
        layers = (module for module in model.modules() if isinstance(module, nn.Linear))
        linear = sum(layer.weight.numel() for layer in layers if layer.weight is not table)
        scale = SCALE_BITS / (rounding.group_size or 1 << 30)
        nbytes -= int(linear * (dtype.itemsize - (rounding.bits + scale) / 8))
    return Description(path, hf_config, dtype, type(model).__name__, count, *_num_read(model), nbytes)


def _num_read(model: PreTrainedModel) -> tuple[int, int]:
    """Return `num_read` and `num_active`."""
    text = model.config.get_text_config()
    counts = [getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    num_experts = next((count for count in counts if isinstance(count, int) and count), 0)
    chosen = getattr(text, "num_experts_per_tok", None) or num_experts
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:  # it has none
        table = None
    read = active = 0
    for name, parameter in model.named_parameters():
        if table is not None and parameter is table.weight and table.weight is not _output_weight(model):
            continue
        read += parameter.numel()
        is_expert = num_experts and ".experts." in f"{name}."
        active += parameter.numel() * chosen // num_experts if is_expert else parameter.numel()
    return read, active


def _output_weight(model: PreTrainedModel) -> torch.Tensor | None:
    layer = model.get_output_embeddings()
    return None if layer is None else layer.weight


def _cache_of(config: EngineConfig, model: PreTrainedModel, max_model_len: int) -> CacheSpec | None:
    """Return what the model keeps of sequences. None if its code needs the values of weights to tell."""
    try:
        layers, _, _, states = probe_layers(model.eval())
        if latents := find_latent_layers(model):
            layers = latents.install()
    except (UnsupportedModel, RuntimeError) as error:
        log.info("the memory of %s is checked once it is loaded: %s", type(model).__name__, error)
        return None
    return CacheSpec(layers, tuple(states), pick_kv_dtype(config.kv_cache_dtype, model.dtype), max_model_len)


def check_architecture(path: Path, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for an encoder-decoder model, an unsupported head, or a model without text output.

    path: the model's directory or GGUF file.
    """
    if is_encoder(hf_config) and (path / MODULES).exists():
        return
    names = getattr(hf_config, "architectures", None)
    has_own_code = "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})
    reason = unsupported(
        names,
        is_encoder_decoder=bool(getattr(hf_config, "is_encoder_decoder", False)),
        is_encoder=is_encoder(hf_config),
        is_decoder=type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING or has_own_code,
    )
    if reason is not None:
        file = path if path.suffix == GGUF else path / CONFIG
        raise unsupported_model(file, names, hf_config.model_type, reason)


def _check_stages(config: EngineConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError if the model cannot be divided into pipeline_parallel_size stages."""
    stages = config.pipeline_parallel_size
    if stages == 1:
        return
    field, text = f"pipeline_parallel_size={stages}", hf_config.get_text_config()
    if find_spec("transformers.distributed.pipeline_parallel") is None:
        raise ConfigError(f"{field}: must be 1 with this version of transformers, which loads no stages")
    check_layers(config, getattr(text, "num_hidden_layers", None))
    if is_classifier(hf_config) or config.classifier_from_token:
        raise ConfigError(f"{field}: must be 1 for a model that classifies")
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ConfigError(f"{field}: must be 1 for a model whose files hold quantized weights")
    if reason := _obstacle(config, hf_config):
        raise ConfigError(f"{field}: must be 1 for {text.model_type}, which cannot be divided: {reason}")


def _obstacle(config: EngineConfig, hf_config: PretrainedConfig) -> str | None:
    """Return why the model cannot be divided; None if it can."""
    try:
        model = described_model(hf_config, config.trust_remote_code)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if recurrent_mixers(model):
        return f"{type(model).__name__} has recurrent layers"
    decoder = model.base_model
    for module, known in ((model, DIVISIBLE_MODULES), (decoder, DECODER_MODULES)):
        if others := sorted(dict(module.named_children()).keys() - known):
            return f"{type(module).__name__} has {', '.join(others)}"
    if decoder is model or not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        return f"{type(decoder).__name__} has no list of layers"
    if getattr(hf_config.get_text_config(), SHARED_LAYERS, None):
        return f"{SHARED_LAYERS} is not 0"
    return None
