"""From a Hugging Face directory to a model on the device, proven to compute the same through pages."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from paged_kernels.cpu import native
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from paged_backend.api.config import DTYPES, HUB_NAME, KV_CACHE_DTYPES, ConfigError, EngineConfig
from paged_backend.api.limits import EmbeddingSpec
from paged_backend.loading import model_files
from paged_backend.loading.model_files import GGUF
from paged_backend.loading.proof import prove
from paged_backend.memory.kv_cache import LayerShape
from paged_backend.models import rope
from paged_backend.models.attention import UnsupportedModel
from paged_backend.models.hidden_states import hidden_size
from paged_backend.models.lora import Lora, find_adaptable_layers
from paged_backend.models.tensor_parallel import check_model, distributed_arguments, replace_dtensors
from paged_backend.text.templates import check_template

log = logging.getLogger("paged_llm")


@dataclass(frozen=True)
class ModelSpec:
    """What the rest of the engine needs to know of a model."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the pool
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    embedding: EmbeddingSpec | None = None  # None: its hidden states cannot be had


@dataclass(frozen=True, eq=False)
class LoadedModel:
    place: Path  # a directory, or a GGUF file
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec
    draft: LoadedModel | None = None  # a smaller model that guesses
    lora: Lora | None = None  # adapters of its linear layers

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """All that keys and values are kept of: the model's, then the draft's."""
        return self.spec.layers + (self.draft.spec.layers if self.draft else ())


def pick_device(config: EngineConfig) -> torch.device:
    """Raises ConfigError where a GPU is asked for and there is none."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError('device="cuda": no usable GPU; use "auto" or "cpu"')
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def load(config: EngineConfig, root: Path, device: torch.device) -> LoadedModel:
    """Raises ConfigError for a directory or option that cannot be used, UnsupportedModel for a model that fails
    the proof."""
    place = find(config.model, root, config, config.revision)
    hf_config = read_config(config, place)
    check_model(config, hf_config)
    model_files.check_config(place, hf_config)
    check_quantization(config, hf_config, place, device)
    text_config = hf_config.get_text_config()
    own = torch.bfloat16 if place.suffix == GGUF else text_config.dtype
    dtype = pick_dtype(config.dtype, own, device)
    max_model_len = pick_max_model_len(config.max_model_len, text_config)
    tokenizer = _load_tokenizer(config, root, place)
    quantized = getattr(hf_config, "quantization_config", None) is not None
    held = None if config.load_format == "dummy" else model_files.check_weights(place, quantized=quantized)
    model_files.check_sizes(place, hf_config, held, dtype=dtype, trust=config.trust_remote_code)
    model = _load_weights(config, hf_config, place, dtype, device)
    if config.tensor_parallel_size > 1:
        replace_dtensors(model)
    model = model.to(device).eval()
    kv_dtype = pick_kv_dtype(config.kv_cache_dtype, dtype)
    embedding = pick_embedding(hf_config, hidden_size(model))
    shapes = find_adaptable_layers(model) if config.enable_lora else None
    spec = ModelSpec(
        layers=_proven(config, place, model, kv_dtype),
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        vocab_size=text_config.vocab_size,
        eos_ids=_eos_ids(place, model, tokenizer, text_config.vocab_size),
        embedding=embedding,
    )
    if shapes is not None and not shapes:
        raise ConfigError(f"enable_lora=true: {type(model).__name__} has no linear layer that can be adapted")
    lora = Lora(model, shapes, slots=config.max_loras, rank=config.max_lora_rank) if shapes is not None else None
    loaded = LoadedModel(place, model, tokenizer, spec, lora=lora)
    return replace(loaded, draft=_load_draft(config, root, device, spec)) if config.speculative_model else loaded


def _proven(config: EngineConfig, place: Path, model: PreTrainedModel, kv_dtype: torch.dtype) -> tuple[LayerShape, ...]:
    try:
        return prove(
            model,
            block_size=config.block_size,
            kv_dtype=kv_dtype,
            compile_level=config.compile_level,
            quantized=config.quantization is not None,
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{place}: {error}") from error


def _load_draft(config: EngineConfig, root: Path, device: torch.device, spec: ModelSpec) -> LoadedModel:
    assert config.speculative_model
    dtype = str(spec.dtype).removeprefix("torch.")
    options = replace(config, model=config.speculative_model, speculative_model=None, dtype=dtype)
    options = replace(options, revision=None, tokenizer=None)
    name = f"speculative_model={json.dumps(config.speculative_model)}"
    try:
        draft = load(replace(options, max_model_len=spec.max_model_len, enable_lora=False), root, device)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    if draft.spec.vocab_size != spec.vocab_size:
        raise ConfigError(f"{name}: has {draft.spec.vocab_size} tokens; must have the model's {spec.vocab_size}")
    return draft


def check(config: EngineConfig, root: Path) -> None:
    """Raises ConfigError for what `load` would refuse before it reads any weights."""
    check_model(config, read_config(config, find(config.model, root, config, config.revision)))


def check_quantization(config: EngineConfig, hf_config: PretrainedConfig, place: Path, device: torch.device) -> None:
    """Raises ConfigError where weights of 8 bits are asked for and cannot be."""
    if config.quantization is None:
        return
    reason = None
    if device.type != "cpu":
        reason = 'is for a CPU only; leave it out, or give device="cpu"'
    elif not native.levels():
        reason = "needs the CPU's kernels, which were not compiled: python -m paged_kernels.cpu.build"
    elif getattr(hf_config, "quantization_config", None) and not _is_widened(hf_config, place):
        reason = "the model's weights are quantized already; leave it out"
    if reason:
        raise ConfigError(f"quantization={json.dumps(config.quantization)}: {reason}")


def read_config(config: EngineConfig, place: Path) -> PretrainedConfig:
    if place.suffix != GGUF:
        model_files.check_texts(place)
    try:
        return AutoConfig.from_pretrained(**_named(place), trust_remote_code=config.trust_remote_code)
    except Exception as error:  # no JSON, an architecture that transformers does not know, values that contradict
        raise ConfigError(f"model={json.dumps(config.model)}: config.json: {error}") from error


def _named(place: Path) -> dict[str, str]:
    """How `from_pretrained` is told of a directory, or of a GGUF file."""
    if place.suffix == GGUF:
        return {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name}
    return {"pretrained_model_name_or_path": str(place)}


def find(name: str, root: Path, config: EngineConfig, revision: str | None = None) -> Path:
    """The files of a model or tokenizer: a directory or a GGUF file, a relative one taken from `root` or else from
    where the server was started, or a repository of the Hugging Face hub in a revision, fetched where the cache lacks
    it. Raises ConfigError."""
    places = [base / Path(name).expanduser() for base in (root, Path.cwd())]
    for path in places:
        if (path / "config.json").is_file() or (path / "tokenizer.json").is_file():
            return path
        if path.suffix == GGUF and path.is_file():
            return path
    if not any(path.exists() for path in places) and HUB_NAME.fullmatch(name):
        return _fetch(name, config, revision)
    raise ConfigError(
        f"model={json.dumps(name)}: no config.json in {places[0]}; give a Hugging Face model directory, or a {GGUF}"
        " file"
    )


def _fetch(name: str, config: EngineConfig, revision: str | None = None) -> Path:
    wanted = ["*.json", "*.model", "*.txt", "*.jinja"]
    wanted += ["*.safetensors"] if config.load_format != "dummy" else []
    wanted += ["*.py"] if config.trust_remote_code else []
    try:
        place = snapshot_download(name, revision=revision, cache_dir=config.download_dir, allow_patterns=wanted)
        return Path(place)
    except Exception as error:  # no network, no such name, no permission: each has an exception of its own
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model={json.dumps(name)}: neither a directory nor on the hub: {reason}") from error


def pick_dtype(wanted: str, own: torch.dtype | None, device: torch.device) -> torch.dtype:
    """`auto` is the model's own type on a GPU; on a CPU bfloat16 where the machine multiplies it, which AMX includes,
    and float32 elsewhere, where 16 bits would have to be widened."""
    if DTYPES[wanted] != "auto":
        return getattr(torch, DTYPES[wanted])
    if device.type == "cpu":
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    return own or torch.float32


def pick_kv_dtype(wanted: str, dtype: torch.dtype) -> torch.dtype:
    """`auto` is the type of the weights and activations."""
    return dtype if KV_CACHE_DTYPES[wanted] == "auto" else getattr(torch, KV_CACHE_DTYPES[wanted])


def pick_max_model_len(wanted: int | None, text_config: PretrainedConfig) -> int:
    """Raises ConfigError for a length that the model's positions do not reach, or at which its angles change."""
    limit, reason = rope.longest(text_config)
    if limit is None and wanted is None:
        raise ConfigError("max_model_len: the model names no limit; give one")
    if limit is not None and wanted is not None and wanted > limit:
        raise ConfigError(f"max_model_len={wanted}: must be at most {limit}, {reason}")
    return wanted or limit


def pick_embedding(hf_config: PretrainedConfig, size: int | None) -> EmbeddingSpec | None:
    """`is_matryoshka` and `matryoshka_dimensions` are the names that vLLM reads, too."""
    if size is None:
        return None
    named = getattr(hf_config, "matryoshka_dimensions", None)
    if isinstance(named, list) and named:
        return EmbeddingSpec(size, tuple(one for one in named if isinstance(one, int) and 0 < one <= size))
    return EmbeddingSpec(size, range(1, size + 1) if getattr(hf_config, "is_matryoshka", False) else ())


def _load_tokenizer(config: EngineConfig, root: Path, place: Path) -> PreTrainedTokenizerBase:
    place = find(config.tokenizer, root, config, config.tokenizer_revision) if config.tokenizer else place
    if place.suffix != GGUF:
        model_files.check_texts(place)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**_named(place), trust_remote_code=config.trust_remote_code)
    except BaseException as error:  # of many kinds; what the library panics of is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ConfigError(f"tokenizer: {_culprit(place)}: {type(error).__name__}: {error}") from error
    try:
        check_template(tokenizer, config.chat_template_timeout)
    except ValueError as error:
        raise ConfigError(f"tokenizer: the chat template in {place} {error}") from error
    return tokenizer


def _culprit(place: Path) -> str:
    """Which file of a tokenizer that cannot be loaded is to blame."""
    own, beside = place / "tokenizer.json", place / "tokenizer_config.json"
    if not own.exists():
        return f"none that can be loaded in {place}"
    try:
        Tokenizer.from_file(str(own))
    except BaseException as error:  # likewise
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return f"{own} cannot be loaded"
    return f"{beside if beside.exists() else own} cannot be loaded"


def _load_weights(
    config: EngineConfig, hf_config: PretrainedConfig, place: Path, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    if config.load_format == "dummy":
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, attn_implementation="eager", trust_remote_code=config.trust_remote_code
            )
        return model if config.tensor_parallel_size == 1 else _share(config, model)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            **_named(place),
            config=hf_config,
            dtype=dtype,
            attn_implementation="eager",
            trust_remote_code=config.trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **_format_arguments(config, hf_config, place, device),
            **distributed_arguments(config),
        )
    except Exception as error:  # a truncated file, a missing shard, not a decoder
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model={json.dumps(config.model)}: cannot be loaded from {place}: {reason}") from error
    model_files.check_found(place, found, quantized=getattr(hf_config, "quantization_config", None) is not None)
    if _is_widened(hf_config, place):
        vars(model.config).pop("quantization_config", None)  # which would call it a quantized model still
    return model


def _is_widened(hf_config: PretrainedConfig, place: Path) -> bool:
    """Whether quantized weights become weights of `dtype` as they are read. transformers multiplies those of GGUF and
    fp8 as they are with the PyPI package `kernels` only, which cannot be installed beside this project's folder."""
    quantization = getattr(hf_config, "quantization_config", None)
    return place.suffix == GGUF or (isinstance(quantization, dict) and quantization.get("quant_method") == "fp8")


def _format_arguments(
    config: EngineConfig, hf_config: PretrainedConfig, place: Path, device: torch.device
) -> dict[str, Any]:
    """What `from_pretrained` is told of the weights' format. Quantized ones are read on the device that they are for,
    by which some formats choose how they compute."""
    if place.suffix == GGUF:
        return {"quantization_config": GgufConfig(dequantize=True)}
    quantization = getattr(hf_config, "quantization_config", None)
    if _is_widened(hf_config, place):
        quantization["dequantize"] = True
    on_device = {"device_map": device} if quantization and config.tensor_parallel_size == 1 else {}
    return {"use_safetensors": True, **on_device}


def _share(config: EngineConfig, model: PreTrainedModel) -> PreTrainedModel:
    """This rank's share of a model that is whole. Only `from_pretrained` takes one apart."""
    return type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        dtype=model.dtype,
        attn_implementation="eager",
        **distributed_arguments(config),
    )


def _eos_ids(
    place: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> frozenset[int]:
    """Every id that the model's files name as an end: generation_config may list several, the tokenizer one more. One
    that the model cannot draw ends nothing. Raises ConfigError for what is no id."""
    named = [model.generation_config.eos_token_id if model.generation_config else None, tokenizer.eos_token_id]
    flat = [one for ids in named for one in (ids if isinstance(ids, list) else [ids]) if one is not None]
    if wrong := [one for one in flat if not isinstance(one, int)]:
        raise ConfigError(
            f"{place / model_files.GENERATION}: eos_token_id={json.dumps(wrong[0], default=str)}: must be token ids"
        )
    ends = frozenset(one for one in flat if 0 <= one < vocab_size)
    if outside := sorted(set(flat) - ends):
        log.warning("%s: eos_token_id: %s ends no output: the model's tokens are 0..%d", place, outside, vocab_size - 1)
    return ends
