"""What a model is according to its configuration and the headers of its files, before its weights are read."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paged_backend.api.config import DTYPES, KV_CACHE_DTYPES, STORES, EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.limits import EmbeddingSpec
from paged_backend.api.options import SLIDING_WINDOW, invalid_option
from paged_backend.files import model_files
from paged_backend.files.config_fields import unsupported, unsupported_model
from paged_backend.files.generation_config import BUILT_IN
from paged_backend.files.model_files import CONFIG, GGUF, MODULES, WeightTotals
from paged_backend.files.start_checks import (
    ALREADY_QUANTIZED,
    check_division,
    check_layers,
    check_length,
    check_ranks,
    draft_errors,
    ranks_named,
)
from paged_backend.kv.cache import CacheSpec, LayerShape, unpackable
from paged_backend.loading import model_sizes
from paged_backend.loading.attention_probe import probe_layers
from paged_backend.loading.classifier import is_classifier
from paged_backend.loading.encoders import is_encoder
from paged_backend.loading.gguf_weights import read_quickly
from paged_backend.loading.model_sizes import described_model
from paged_backend.loading.model_source import ModelSource, find_model
from paged_backend.loading.quantized_checkpoint import check_method, is_dequantized
from paged_backend.loading.shallow_copy import SHARED_LAYERS
from paged_backend.loading.weights import is_quantized
from paged_backend.models import rope
from paged_backend.models.attention import UnsupportedModel
from paged_backend.models.latent_attention import find_latent_layers
from paged_backend.models.quantization import QuantizationSpec
from paged_backend.models.recurrent import recurrent_mixers
from paged_backend.utils.startup import Progress
from paged_kernels.cpu import native

log = logging.getLogger("paged_llm")

INT4_GROUP_SIZE = 32
SCALE_BITS = 16  # bits of the scale of a group of quantized weights
# The modules of a model that can be divided into stages. Any other module may depend on layers of other stages.
DIVISIBLE_MODULES = frozenset({"model", "lm_head"})
DECODER_MODULES = frozenset({"embed_tokens", "layers", "norm", "rotary_emb", "rotary_emb_local"})

# Options that encoders do not support.
WITHOUT_ENCODERS = (
    *("quantization", "kv_cache_dtype", "batch_invariant", "enable_lora", "num_speculative_tokens"),
    *("classifier_from_token", "tensor_parallel_size", "pipeline_parallel_size", *STORES),
)
UNUSED_BY_ENCODERS = ("swap_space", "kv_cache_memory_bytes", "num_gpu_blocks_override", "override_generation_config")


@dataclass(frozen=True, eq=False)
class Description:
    """A model that is not loaded."""

    source: ModelSource
    dtype: torch.dtype
    name: str  # name of the model's class
    num_parameters: int
    num_read: int  # parameters that are multiplied; a table of embeddings is not
    num_active: int  # parameters that one token is multiplied by, which excludes experts that it does not select
    weight_bytes: int  # in memory, about
    cache: CacheSpec | None = None  # None: an encoder, or a model whose layers only show once it is loaded
    draft: Description | None = None

    def read_bytes(self, batch: int) -> float:
        """Return the bytes of weights that a step of `batch` tokens reads, on all ranks together. A token reads its own
        experts. Several tokens are taken to read different ones, up to all experts."""
        return self.weight_bytes * min(self.num_active * batch, self.num_read) / self.num_parameters


def describe(config: EngineConfig, root: Path, device: torch.device) -> Description:
    """Return the description of the model that the options name. Raises ConfigError for a model that cannot be
    loaded, as far as its configuration and the headers of its files show."""
    path = find_model(config, root)
    with read_quickly(path):
        return describe_files(config, root, device, path)


def describe_files(config: EngineConfig, root: Path, device: torch.device, path: Path) -> Description:
    """Return the description of the model in these files, with its draft model."""
    progress = Progress("reading the configuration", 2)
    source = check_config(config, path)
    hf_config = source.hf_config
    progress.advance()
    if is_encoder(hf_config):
        dtype = pick_dtype(config.dtype, hf_config.dtype, device)
        model, totals = _model_of(source, AutoModel)
        progress.advance()
        return _description(config, source, dtype, model, totals)
    check_method(hf_config, path, device, config.tensor_parallel_size)
    check_quantization(config, source, device)
    check_batch_invariance(config, source, device)
    text_config = hf_config.get_text_config()
    dtype = pick_dtype(config.dtype, torch.bfloat16 if path.suffix == GGUF else text_config.dtype, device)
    max_model_len = pick_max_model_len(config.max_model_len, text_config)
    model, totals = _model_of(source, AutoModelForCausalLM)
    described = _description(config, source, dtype, model, totals)
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


def check_config(config: EngineConfig, path: Path) -> ModelSource:
    """Read the model's configuration. Raises ConfigError if it is not supported, or not with these options."""
    source = ModelSource.read(config, path)
    hf_config = source.hf_config
    check_architecture(path, hf_config)
    if config.num_speculative_tokens and is_classifier(hf_config):
        problem = f"{json.dumps(list(hf_config.architectures or ()))} only classifies and generates no tokens"
        raise invalid_option("num_speculative_tokens", config.num_speculative_tokens, f"{problem}; leave it out")
    if is_encoder(hf_config):
        kind = f"{json.dumps(hf_config.model_type)}, which is an encoder"
        config.reject(WITHOUT_ENCODERS, f"not supported for {kind}; leave it out")
        if unused := [option for option in UNUSED_BY_ENCODERS if getattr(config, option)]:
            log.warning("no effect with an encoder: %s", ", ".join(unused))
    check_shards(config, hf_config)
    if config.pipeline_parallel_size > 1 and path.suffix == GGUF:
        raise ConfigError(f"pipeline_parallel_size={config.pipeline_parallel_size}: must be 1 for a GGUF file")
    _check_stages(config, hf_config)
    return source


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


def _model_of(source: ModelSource, kind: type) -> tuple[PreTrainedModel, WeightTotals | None]:
    """Return the model without memory for its weights, and the totals of its files."""
    totals = None
    if source.dummy_seed is None:
        totals = model_files.check_weights(source.path, quantized=is_quantized(source.hf_config))
    trusted = source.trust_remote_code
    model = model_sizes.check_sizes(source.path, source.hf_config, totals, trust_remote_code=trusted, kind=kind)
    return model, totals


def _description(
    config: EngineConfig,
    source: ModelSource,
    dtype: torch.dtype,
    model: PreTrainedModel,
    totals: WeightTotals | None,
) -> Description:
    count = sum(parameter.numel() for parameter in model.parameters())
    nbytes = count * dtype.itemsize
    if totals and (totals.is_quantized or (is_quantized(source.hf_config) and source.path.suffix != GGUF)):
        nbytes = min(nbytes, totals.num_bytes)
    elif rounding := quantization_spec(config, dtype):
        table = model.get_input_embeddings().weight  # if an output layer shares it, it also has a rounded copy
        layers = (module for module in model.modules() if isinstance(module, nn.Linear))
        linear = sum(layer.weight.numel() for layer in layers if layer.weight is not table)
        scale = SCALE_BITS / (rounding.group_size or 1 << 30)
        nbytes -= int(linear * (dtype.itemsize - (rounding.bits + scale) / 8))
    return Description(source, dtype, type(model).__name__, count, *_num_read(model), nbytes)


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
            layers = latents.shapes
    except (UnsupportedModel, RuntimeError) as error:
        log.info("the memory of %s is checked once it is loaded: %s", type(model).__name__, error)
        return None
    layers = skip_layers(config, layers, model.dtype)
    return CacheSpec(layers, tuple(states), pick_kv_dtype(config.kv_cache_dtype, model.dtype), max_model_len)


def skip_layers(config: EngineConfig, layers: tuple[LayerShape, ...], dtype: torch.dtype) -> tuple[LayerShape, ...]:
    """Return the layers of a model, of which those that the options name keep `dtype`. Raises ConfigError."""
    field, names = "kv_cache_dtype_skip_layers", config.kv_cache_dtype_skip_layers or ()
    for name in names:
        if isinstance(name, int) and name >= len(layers):
            raise invalid_option(field, names, f"{name}: the model has the layers 0 to {len(layers) - 1}")
        if name == SLIDING_WINDOW and not any(layer.window for layer in layers):
            raise invalid_option(field, names, f"{name}: the model has no layer with a window")
    layers = tuple(
        replace(layer, dtype=dtype) if index in names or (layer.window and SLIDING_WINDOW in names) else layer
        for index, layer in enumerate(layers)
    )
    for index, layer in enumerate(layers) if config.packs_blocks else ():
        if layer.dtype is None and (reason := unpackable(layer)):
            raise invalid_option("kv_cache_dtype", "int4", f"layer {index} {reason}; use int8 or fp8")
    return layers


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


def check_shards(config: EngineConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError if the model cannot be sharded over tensor_parallel_size ranks."""
    size, text = config.tensor_parallel_size, hf_config.get_text_config()
    if size == 1:
        return
    if not text.base_model_tp_plan:
        raise ConfigError(
            f"tensor_parallel_size={size}: must be 1 (transformers has no tensor parallel plan for {text.model_type})"
        )
    if config.classifier_from_token is not None:
        tokens = json.dumps(list(config.classifier_from_token))
        raise ConfigError(f"classifier_from_token={tokens}: not supported with tensor_parallel_size={size}")
    check_division(config, lambda name: getattr(text, name, None))


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


def pick_device(config: EngineConfig) -> torch.device:
    """Return the device of the engine. Raises ConfigError if a GPU is requested but not usable, for more ranks on this
    machine than GPUs, and for ranks on a CPU beside a GPU."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError('device="cuda": no usable GPU; use "auto" or "cpu"')
    if config.device != "cpu" and available:
        check_ranks(config, torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    if config.num_ranks > 1 and available:
        raise ConfigError(
            f'{ranks_named(config)} device="cpu" requires that no GPU is visible (CUDA_VISIBLE_DEVICES="")'
        )
    return torch.device("cpu")


def pick_dtype(requested: str, model_dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the data type of weights and activations.

    `auto` is the model's own type on a GPU. On a CPU it is bfloat16 if the CPU has instructions for it (AVX512-BF16,
    AMX), otherwise float32, because 16-bit values would have to be widened.
    """
    if DTYPES[requested] != "auto":
        return getattr(torch, DTYPES[requested])
    if device.type == "cpu":
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    return model_dtype or torch.float32


def pick_kv_dtype(requested: str, dtype: torch.dtype) -> torch.dtype:
    """Return the data type of the KV cache. `auto` is the type of the weights and activations."""
    return dtype if KV_CACHE_DTYPES[requested] == "auto" else getattr(torch, KV_CACHE_DTYPES[requested])


def pick_max_model_len(requested: int | None, text_config: PretrainedConfig) -> int:
    """Return the context length. Raises ConfigError if it exceeds the model's positions or static rope angles."""
    limit, reason = rope.max_static_len(text_config)
    if requested is None:
        if limit is None:
            raise ConfigError("max_model_len: the model's configuration has no limit; set the option")
        return limit
    check_length(requested, limit, reason)
    return requested


def pick_embedding(hf_config: PretrainedConfig, size: int | None) -> EmbeddingSpec | None:
    """Return the supported embeddings; None without a hidden size.

    vLLM reads the same fields, `is_matryoshka` and `matryoshka_dimensions`.
    """
    if size is None:
        return None
    dimensions = getattr(hf_config, "matryoshka_dimensions", None)
    if isinstance(dimensions, list) and dimensions:
        return EmbeddingSpec(size, tuple(n for n in dimensions if isinstance(n, int) and 0 < n <= size))
    return EmbeddingSpec(size, range(1, size + 1) if getattr(hf_config, "is_matryoshka", False) else ())


def check_quantization(config: EngineConfig, source: ModelSource, device: torch.device) -> None:
    """Raise ConfigError if quantized weights are requested but not possible."""
    if config.quantization is None:
        return
    reason = None
    if device.type != "cpu":
        reason = 'only supported on a CPU; leave it out, or set device="cpu"'
    elif not native.levels():
        reason = "requires the CPU kernels, which have not been compiled; run: python -m paged_kernels.cpu.build"
    elif _has_quantized_weights(source):
        reason = ALREADY_QUANTIZED
    if reason:
        raise ConfigError(f"quantization={json.dumps(config.quantization)}: {reason}")


def check_batch_invariance(config: EngineConfig, source: ModelSource, device: torch.device) -> None:
    """Raise ConfigError if batch invariance is requested but not possible on the device."""
    if not config.batch_invariant:
        return
    if device.type == "cuda" and _has_quantized_weights(source):
        raise ConfigError(
            "batch_invariant=true: not supported on a GPU with quantized weights, which other libraries multiply in an"
            " order that depends on the batch"
        )
    if device.type == "cpu" and not native.levels():
        raise ConfigError(
            "batch_invariant=true: requires the CPU kernels, which have not been compiled; run: python -m"
            " paged_kernels.cpu.build"
        )


def _has_quantized_weights(source: ModelSource) -> bool:
    """Return whether the model has quantized weights that stay quantized when they are loaded. Raises ConfigError."""
    if source.path.suffix == GGUF:
        return source.dummy_seed is None and model_files.check_gguf(source.path).is_quantized
    quantized = bool(getattr(source.hf_config, "quantization_config", None))
    return quantized and not is_dequantized(source.hf_config, source.path)


def rounds_activations(config: EngineConfig, dtype: torch.dtype) -> bool:
    """Return whether activations of a type are rounded to 8 bits before they are multiplied by quantized weights."""
    return config.quantized_activations == "int8" or (config.quantized_activations == "auto" and dtype != torch.float32)


def quantization_spec(config: EngineConfig, dtype: torch.dtype) -> QuantizationSpec | None:
    """Return how weights are rounded in a model with activations of a type, or None if they are not."""
    if config.quantization is None:
        return None
    is_int4 = config.quantization == "int4"
    group_size = config.quantization_group_size or (INT4_GROUP_SIZE if is_int4 else None)
    return QuantizationSpec(4 if is_int4 else 8, group_size, rounds_activations(config, dtype))
