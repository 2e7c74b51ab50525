"""Load the weights of a model with transformers, or initialize them at random."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import is_accelerate_available

from paged_backend.api.errors import ConfigError
from paged_backend.distributed.group_sockets import group_sockets
from paged_backend.files import model_files
from paged_backend.files.model_files import GGUF
from paged_backend.loading import model_sizes
from paged_backend.loading.classifier import as_decoder, is_classifier, without_head
from paged_backend.loading.load_progress import weights_reported
from paged_backend.loading.model_source import ModelSource, source_arguments
from paged_backend.loading.quantized_checkpoint import QuantizedCheckpoint, is_dequantized
from paged_backend.models.pipeline import plans_of_stage
from paged_backend.models.tensor_parallel import NOT_PARALLEL, Parallelism, distributed_arguments


def load_weights(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    checkpoint: QuantizedCheckpoint | None = None,
    ranks: Parallelism = NOT_PARALLEL,
) -> PreTrainedModel:
    """Load the model, or this rank's shards of it, in `dtype`. Raises ConfigError.

    checkpoint: the quantized weights of the files, which are converted to `dtype`; None: transformers reads the files.
    """
    hf_config, path = source.hf_config, source.path
    if source.dummy_seed is not None:
        with _several_ranks(ranks, device):
            return _random_weights(source, dtype, device, ranks)
    common = {
        "dtype": dtype,
        "attn_implementation": "eager",
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    } | distributed_arguments(ranks)
    with load_errors_named(source):
        model_config = as_decoder(hf_config) if is_classifier(hf_config) else hf_config
        with weights_reported(), _several_ranks(ranks, device):
            if checkpoint is not None:
                model, info = _from_checkpoint(source, model_config, checkpoint, dtype, common)
            else:
                model, info = AutoModelForCausalLM.from_pretrained(
                    **source_arguments(path),
                    config=model_config,
                    trust_remote_code=source.trust_remote_code,
                    **_format_arguments(source, device, is_whole=ranks.size == 1),
                    **common,
                )
    if is_classifier(hf_config):
        info = without_head(info)
    model_sizes.check_loading_info(path, info, quantized=is_quantized(hf_config) and checkpoint is None)
    if is_dequantized(hf_config, path):
        vars(model.config).pop("quantization_config", None)  # otherwise marks the model as quantized
    return model


@contextmanager
def load_errors_named(source: ModelSource) -> Iterator[None]:
    """Raise ConfigError with the model's name and path for any error inside the context."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # e.g. a truncated file, a missing shard, not a decoder
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model={json.dumps(source.name)}: cannot be loaded from {source.path}: {reason}") from error


@contextmanager
def _several_ranks(ranks: Parallelism, device: torch.device) -> Iterator[None]:
    """Inside the context, transformers loads this rank's part of the model, and connects the ranks that share it."""
    with ExitStack() as stack:
        if ranks.size > 1:
            stack.enter_context(group_sockets(gloo=device.type == "cpu"))
        if ranks.pipeline > 1:
            stack.enter_context(plans_of_stage())
        yield


def _from_checkpoint(
    source: ModelSource,
    model_config: PretrainedConfig,
    checkpoint: QuantizedCheckpoint,
    dtype: torch.dtype,
    common: dict[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model with the checkpoint's weights in `dtype`, and transformers' loading info."""
    plain = copy.deepcopy(model_config)
    vars(plain).pop(model_files.QUANTIZATION, None)
    kind = type(model_sizes.described_model(plain, source.trust_remote_code))
    model, info = kind.from_pretrained(None, config=plain, state_dict=checkpoint.state_dict(dtype), **common)
    if (source.path / model_files.GENERATION).exists():
        model.generation_config = GenerationConfig.from_pretrained(source.path)
    return model, info


def is_quantized(hf_config: PretrainedConfig) -> bool:
    """Return whether the files hold quantized weights."""
    return getattr(hf_config, "quantization_config", None) is not None


def _format_arguments(source: ModelSource, device: torch.device, *, is_whole: bool) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for the format of the weights.

    Weights are read directly to a GPU, one file after the other, instead of all of them to host memory first. Quantized
    weights are also read directly to a CPU, because some formats select their kernels by the device.
    """
    hf_config, path = source.hf_config, source.path
    if path.suffix == GGUF:
        return {"quantization_config": GgufConfig(dequantize=True)}
    quantization: Any = getattr(hf_config, "quantization_config", None)
    if is_dequantized(hf_config, path):
        quantization["dequantize"] = True
    to_gpu = device.type != "cpu" and is_accelerate_available()
    return {"use_safetensors": True} | ({"device_map": device} if is_whole and (quantization or to_gpu) else {})


def _random_weights(
    source: ModelSource, dtype: torch.dtype, device: torch.device, ranks: Parallelism
) -> PreTrainedModel:
    """Return a model with random weights, which are generated on the device, or for several ranks on the CPU."""
    where = device if ranks.size == 1 else torch.device("cpu")
    with torch.random.fork_rng(), where:
        torch.manual_seed(source.dummy_seed or 0)
        model = AutoModelForCausalLM.from_config(
            source.hf_config, dtype=dtype, attn_implementation="eager", trust_remote_code=source.trust_remote_code
        )
    return model if ranks.size == 1 else _shard(model, ranks)


def _shard(model: PreTrainedModel, ranks: Parallelism) -> PreTrainedModel:
    """Return this rank's shards of a whole model. Only `from_pretrained` can shard a model."""
    return type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        dtype=model.dtype,
        attn_implementation="eager",
        **distributed_arguments(ranks),
    )
