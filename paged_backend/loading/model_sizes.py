"""Compare a model's configuration with its weight files, before memory is allocated for the sizes that it claims."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from paged_backend.api.errors import ConfigError
from paged_backend.files.config_fields import MAX_LAYERS, check_counts, check_layer_sizes
from paged_backend.files.model_files import CONFIG, GGUF, INDEX, WEIGHTS, WeightTotals, files_with_tensors
from paged_backend.models import rope

# Factor by which config.json may exceed the weights in the files; `check_loading_info` then names the missing ones.
SLACK = 2


def read_tensor(model_path: Path, name: str) -> torch.Tensor | None:
    """Return a tensor of the weights that `check_weights` has checked, or None if they have no such tensor."""
    for path, expected in files_with_tensors(model_path):
        if expected is None or name in expected:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118 (not a mapping)
    return None


def open_weights(model_path: Path) -> dict[Path, Any]:
    """Return the weight files that `check_weights` has checked, opened by safetensors."""
    return {path: safe_open(path, framework="pt").__enter__() for path, _ in files_with_tensors(model_path)}


def check_sizes(
    model_path: Path,
    config: PretrainedConfig,
    totals: WeightTotals | None,
    *,
    trust_remote_code: bool,
    kind: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Return the model that the configuration describes, without memory for its weights. Raises ConfigError if it has
    no layers or describes more weights than the files contain.

    totals: totals of the weight files; None without them. kind: class of transformers that finds the model's class.
    """
    text, name = config.get_text_config(), model_path / CONFIG if model_path.suffix != GGUF else model_path
    packed = (
        getattr(config, "quantization_config", None) is not None and model_path.suffix != GGUF
    )  # quantized weights hold several elements in one
    limit = 2**31 - 1 if totals is None else 8 * totals.num_bytes if packed else totals.num_elements
    layers = MAX_LAYERS if totals is None else totals.num_tensors
    check_counts(name, partial(_field, text), max_layers=layers)
    for layer in _layer_configs(text):
        check_layer_sizes(name, partial(_field, layer), limit)
    _check_rope(name, text)
    try:
        model = described_model(config, trust_remote_code, kind)
    except Exception as error:
        raise ConfigError(f"{name}: does not describe a valid model: {type(error).__name__}: {error}") from error
    described = sum(parameter.numel() for parameter in model.parameters())
    if totals is not None and described > (limit if packed else SLACK * limit):
        raise ConfigError(f"{name}: describes {described} weights; the files contain {totals.num_elements}")
    return model


def _field(config: PretrainedConfig, name: str) -> Any:
    return getattr(config, name, None)


def _layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the configuration of each layer if sizes differ between layers, as in Gemma 4, else the model's."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def _check_rope(file: Path, config: PretrainedConfig) -> None:
    for parameters in rope.parameters(config):
        theta = parameters.get("rope_theta")
        if theta is not None and not (isinstance(theta, int | float) and 0 < theta < math.inf):
            raise ConfigError(f"{file}: rope_theta={json.dumps(theta, default=str)}: must be a positive number")


def described_model(
    config: PretrainedConfig, trust_remote_code: bool, kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Return the model that a configuration describes, without memory for its weights. kind: as in `check_sizes`.

    Model code raises any type for inconsistent sizes.
    """
    with torch.device("meta"), no_init_weights():  # initialization without memory would import dynamo: 1.5 s
        model: PreTrainedModel = kind.from_config(
            copy.deepcopy(config), attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    return model


def check_loading_info(model_path: Path, info: dict[str, Iterable[Any]], *, quantized: bool) -> None:
    """Raise ConfigError for missing or unexpected tensors, according to the loading info of transformers.

    transformers initializes missing weights at random and ignores unexpected ones. Some formats of `quantized` weights
    store tensors beside the weights, so unexpected tensors are allowed for them.
    """
    named = next((model_path / name for name in (WEIGHTS, INDEX) if (model_path / name).exists()), model_path)
    missing = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if missing:
        raise ConfigError(f"{named}: {_shown(missing)} missing or not in the shape that {CONFIG} gives")
    if not quantized and (extra := sorted(info["unexpected_keys"])):
        raise ConfigError(f"{named}: contains {_shown(extra)}, which the model of {CONFIG} does not have")


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
