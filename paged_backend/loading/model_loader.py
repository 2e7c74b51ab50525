"""Load a model from Hugging Face files onto the device, and verify that paged attention gives the same logits."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.limits import ClassificationSpec, EmbeddingSpec, SamplingDefaults
from paged_backend.files import model_files
from paged_backend.files.generation_config import read_sampling_defaults
from paged_backend.files.model_files import GGUF
from paged_backend.files.quantization_fields import method_of
from paged_backend.files.start_checks import draft_errors
from paged_backend.kv.cache import NO_ATTENTION, CacheSpec, LayerShape, StateShape
from paged_backend.loading import encoders
from paged_backend.loading.classifier import is_classifier, load_classifier
from paged_backend.loading.description import (
    Description,
    check_config,
    describe_files,
    draft_options,
    pick_embedding,
    pick_kv_dtype,
    pick_max_model_len,
    quantization_spec,
    rounds_activations,
    skip_layers,
)
from paged_backend.loading.earlier_starts import EarlierStarts, OutdatedOutcome
from paged_backend.loading.gguf_weights import GgufWeights, read_quickly
from paged_backend.loading.model_source import find_model, load_tokenizer
from paged_backend.loading.quantized_checkpoint import QuantizedCheckpoint, format_of, is_dequantized, settings_of
from paged_backend.loading.stored_weights import StoredQuantizer, StoredWeights, log_dequantized
from paged_backend.loading.verification import verify_model
from paged_backend.loading.weights import load_weights
from paged_backend.models import rope, tensor_parallel
from paged_backend.models.attention import UnsupportedModel
from paged_backend.models.hidden_states import hidden_size
from paged_backend.models.latent_attention import absorbed_layers
from paged_backend.models.linear import WeightQuantizer
from paged_backend.models.lora import Lora, find_adaptable_layers
from paged_backend.models.pipeline import check_stage, keep_stage
from paged_backend.models.quantization import Quantizer
from paged_backend.models.recurrent import state_shapes
from paged_backend.models.tensor_parallel import Parallelism
from paged_backend.utils.machine import available_memory
from paged_kernels.cpu import native

log = logging.getLogger("paged_llm")

# What models have been trained on: prose with numbers, and a list.
VERIFIED_TEXT = "Paris is the capital of France. In 1969, two people walked on the Moon:\n1. Neil Armstrong\n"


@dataclass(frozen=True)
class ModelSpec:
    """The properties of a model that the rest of the engine needs."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    kv_dtype: torch.dtype  # dtype of the KV cache
    max_model_len: int
    supported_len: int | None  # maximum context length of the model; None if its configuration has none
    num_parameters: int
    vocab_size: int
    eos_ids: frozenset[int]
    sampling_defaults: SamplingDefaults
    embedding: EmbeddingSpec | None = None  # None: the model does not support embeddings
    classification: ClassificationSpec | None = None  # None: the model does not classify
    generates: bool = True  # False: the model only classifies or embeds
    weight_format: str | None = None  # format of quantized weights, by option ("int8") or in the files ("AWQ")
    states: tuple[StateShape, ...] = ()  # states of the recurrent layers
    pooling: str | None = None  # pooling of an encoder, which computes a prompt in one step and keeps nothing of it


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model on its device, with its tokenizer, draft model and adapter slots."""

    path: Path  # a directory or a GGUF file
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec
    draft: LoadedModel | None = None  # the draft model of speculative decoding
    lora: Lora | None = None

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """All layers with a KV cache: the model's, then the draft model's."""
        return self.spec.layers + (self.draft.spec.layers if self.draft else ())

    @property
    def cache(self) -> CacheSpec:
        """What the model and its draft model keep of sequences."""
        return CacheSpec(self.layers, self.spec.states, self.spec.kv_dtype, self.spec.max_model_len)


def load(
    config: EngineConfig,
    root: Path,
    device: torch.device,
    check: Callable[[Description], None] = lambda described: None,
) -> LoadedModel:
    """Load and verify the model, with its draft model and adapter slots if configured.

    check: called before weights are read. Raises ConfigError for unusable files or options, and UnsupportedModel for a
    model that fails the verification.
    """
    path = find_model(config, root)
    is_verified = not config.skip_verification and config.load_format != "dummy"
    with read_quickly(path):
        described = describe_files(config, root, device, path)
        if config.load_format == "dummy":
            _check_dummy(described)
        check(described)
        if encoders.is_encoder(described.source.hf_config):
            return _load_encoder(config, root, device, described)
        earlier = EarlierStarts(path, asdict(config), device) if is_verified and config.num_ranks == 1 else None
        try:
            return _load(config, root, device, described, earlier)
        except OutdatedOutcome as error:
            assert earlier
            log.warning("%s: the result of an earlier start is ignored: %s", path, error)
            earlier.forget()
        gc.collect()  # frees the first model
        described = describe_files(config, root, device, path)  # the first configuration may be changed
        return _load(config, root, device, described, earlier)


def _check_dummy(described: Description) -> None:
    """Raise ConfigError if the weights, whose number no file limits, do not fit into the memory."""
    memory, file = available_memory(), described.source.path / model_files.CONFIG
    if described.num_parameters * described.dtype.itemsize > memory:
        raise ConfigError(
            f"{file}: describes {described.num_parameters} weights in {described.dtype}; available memory is"
            f" {memory} bytes"
        )


def _load(
    config: EngineConfig,
    root: Path,
    device: torch.device,
    described: Description,
    earlier: EarlierStarts | None,
) -> LoadedModel:
    source, dtype = described.source, described.dtype
    path, hf_config = source.path, source.hf_config
    text_config = hf_config.get_text_config()
    model_dtype = torch.bfloat16 if path.suffix == GGUF else text_config.dtype
    max_model_len = pick_max_model_len(config.max_model_len, text_config)
    tokenizer = load_tokenizer(config, root, path)
    sampling_defaults = read_sampling_defaults(config.generation_config, config.override_generation_config, root, path)
    dummy = source.dummy_seed is not None
    form = None if dummy else format_of(hf_config, path, device)
    checkpoint = QuantizedCheckpoint(path, form) if form else None
    ranks = Parallelism(config.tensor_parallel_size, config.pipeline_parallel_size)
    model = load_weights(source, dtype, device, checkpoint, ranks)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())  # some are freed later
    if ranks.tensor > 1:
        tensor_parallel.replace_dtensors(model)
    if ranks.pipeline > 1:
        keep_stage(model)
        num_parameters = described.num_parameters  # parameters of all stages
    model = model.to(device).eval()
    if config.batch_invariant and device.type == "cpu":
        native.avoid_tiles()
    if ranks.pipeline > 1:
        _check_stage(config, model)
    kv_dtype = pick_kv_dtype(config.kv_cache_dtype, dtype)
    embedding = pick_embedding(hf_config, hidden_size(model))
    classification = load_classifier(
        source, model, tokenizer, config.classifier_from_token, renders_pairs=config.chat_template is not None
    )
    adaptable = find_adaptable_layers(model) if config.enable_lora else None  # must precede `verify_model`
    stored = checkpoint or (GgufWeights(path, model.config) if path.suffix == GGUF and not dummy else None)
    layers, weight_format = _verify(config, path, model, tokenizer, kv_dtype, model_dtype, stored, earlier)
    layers = skip_layers(config, layers, dtype)
    if stored is None and is_dequantized(hf_config, path) and not dummy:
        log_dequantized(path, model)
    spec = ModelSpec(
        layers=layers,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        supported_len=rope.max_static_len(text_config)[0],
        num_parameters=num_parameters,
        vocab_size=text_config.vocab_size,
        eos_ids=_eos_ids(path, model, tokenizer, text_config.vocab_size),
        embedding=embedding,
        classification=classification,
        generates=not is_classifier(hf_config),
        sampling_defaults=sampling_defaults,
        weight_format=weight_format,
        states=state_shapes(model),
    )
    if adaptable is not None:
        for name in absorbed_layers(model):
            adaptable.pop(name, None)
    lora = _create_lora(config, hf_config, model, adaptable) if adaptable is not None else None
    draft = _load_draft(config, root, device, spec) if config.speculative_model else None
    return LoadedModel(path, model, tokenizer, spec, draft, lora)


def _check_stage(config: EngineConfig, model: PreTrainedModel) -> None:
    try:
        check_stage(model)
    except UnsupportedModel as error:
        name = type(model).__name__
        raise UnsupportedModel(
            f"pipeline_parallel_size={config.pipeline_parallel_size}: must be 1 for {name}: it {error}"
        ) from error


def check_model(config: EngineConfig, root: Path) -> None:
    """Raise ConfigError for a model that `load` would refuse before reading any weights."""
    check_config(config, find_model(config, root))


def _load_encoder(config: EngineConfig, root: Path, device: torch.device, described: Description) -> LoadedModel:
    source, dtype = described.source, described.dtype
    path, hf_config = source.path, source.hf_config
    tokenizer = load_tokenizer(config, root, path)
    model, pooling = encoders.load_encoder(source, dtype, device)
    try:
        max_model_len, supported_len = encoders.context_length(
            config.max_model_len, config.max_num_batched_tokens, path, model
        )
        if not config.skip_verification and config.load_format != "dummy":
            encoders.verify_encoder(model, tokenizer(VERIFIED_TEXT)["input_ids"][:max_model_len])
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    embedding = pick_embedding(hf_config, model.hidden_size)
    spec = ModelSpec(
        layers=(NO_ATTENTION,),
        dtype=dtype,
        kv_dtype=dtype,
        max_model_len=max_model_len,
        supported_len=supported_len,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=hf_config.vocab_size,
        eos_ids=frozenset(),
        sampling_defaults=SamplingDefaults(),
        embedding=replace(embedding, keeps_first=True) if embedding else None,
        generates=False,
        pooling=pooling,
    )
    return LoadedModel(path, model, tokenizer, spec)


def _verify(
    config: EngineConfig,
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kv_dtype: torch.dtype,
    trained_dtype: torch.dtype | None,
    stored: StoredWeights | None,
    earlier: EarlierStarts | None,
) -> tuple[tuple[LayerShape, ...], str | None]:
    """Verify the model with the weights that it will run with: rounded if requested, otherwise on a CPU the quantized
    ones of its files.

    Returns the KV cache shapes of its layers, and the format of quantized weights, if there are any.
    """
    quantizer: Quantizer | None = None
    keeper = rounder = None
    if stored:
        int8_rows = rounds_activations(config, model.dtype)
        ranks = Parallelism(config.tensor_parallel_size)
        keeper = StoredQuantizer(
            stored, model, ranks.own, ranks.tensor, int8_rows=int8_rows, batch_invariant=config.batch_invariant
        )
    if spec := quantization_spec(config, model.dtype):
        quantizer = rounder = WeightQuantizer(spec, model, batch_invariant=config.batch_invariant)
        keeper = None
    elif keeper and model.device.type == "cpu" and native.levels():
        quantizer = keeper
    if quantizer is None and config.quantized_activations == "int8" and model.device.type == "cpu":
        log.warning('quantized_activations="int8" has no effect: no weights of %s are quantized', path)
    try:
        layers = verify_model(
            model,
            block_size=config.block_size,
            kv_dtype=kv_dtype,
            text=tokenizer(VERIFIED_TEXT)["input_ids"],
            quantizer=quantizer,
            batch_invariant=config.batch_invariant,
            trained_dtype=trained_dtype,
            skip=config.skip_verification,
            earlier=earlier,
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    if rounder:
        return layers, rounder.log_rounded()
    return layers, keeper.log_widened() if keeper else None


def _create_lora(
    config: EngineConfig, hf_config: PretrainedConfig, model: PreTrainedModel, adaptable: dict[str, tuple[int, int]]
) -> Lora:
    if not adaptable:
        settings = settings_of(hf_config)
        of = f" with weights of {json.dumps(method_of(settings))}" if settings else ""
        raise ConfigError(f"enable_lora=true: {type(model).__name__}{of} has no linear layer that can be adapted")
    return Lora(
        model,
        adaptable,
        slots=config.max_loras,
        rank=config.max_lora_rank,
        batch_invariant=config.batch_invariant,
    )


def _load_draft(config: EngineConfig, root: Path, device: torch.device, spec: ModelSpec) -> LoadedModel:
    """Load the draft model with the dtype and context length of the model."""
    options = draft_options(config, spec.dtype, spec.max_model_len)
    with draft_errors(config):
        draft = load(options, root, device)
    field = f"speculative_model={json.dumps(config.speculative_model)}"
    if not draft.spec.generates:
        raise ConfigError(f"{field}: only classifies, without an output layer; a draft model must generate tokens")
    if draft.spec.states:
        raise ConfigError(f"{field}: {type(draft.model).__name__} has recurrent layers; a draft model must have none")
    if draft.spec.vocab_size != spec.vocab_size:
        raise ConfigError(f"{field}: has {draft.spec.vocab_size} tokens; must have the model's {spec.vocab_size}")
    return draft


def _eos_ids(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> frozenset[int]:
    """Return all end-of-sequence ids, of generation_config.json and of the tokenizer.

    Ids outside the vocabulary are ignored with a warning. Raises ConfigError for values that are not token ids.
    """
    named = [model.generation_config.eos_token_id if model.generation_config else None, tokenizer.eos_token_id]
    flat = [token for ids in named for token in (ids if isinstance(ids, list) else [ids]) if token is not None]
    if invalid := [token for token in flat if not isinstance(token, int)]:
        raise ConfigError(
            f"{path / model_files.GENERATION}: eos_token_id={json.dumps(invalid[0], default=str)}: must be token ids"
        )
    eos_ids = frozenset(token for token in flat if 0 <= token < vocab_size)
    if outside := sorted(set(flat) - eos_ids):
        log.warning("%s: eos_token_id: ignored %s: must be within 0..%d", path, outside, vocab_size - 1)
    return eos_ids
