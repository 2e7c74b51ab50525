"""Read LoRA adapters in PEFT's format: a directory of adapter_config.json and adapter_model.safetensors.

An adapter changes the output of a linear layer from y = W x to y = W x + scaling * B (A x). A configuration that asks
for any other change is refused, and the error names the field.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import regex
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paged_backend.api.request import Adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 64 << 20  # maximum size of the weights file besides its tensors
PATTERN_SECONDS = 1.0  # total time limit for matching the patterns of a configuration against layer names
MAX_PATTERN_CHARS = 1000
MAX_ALPHA = 1e30
PICKLE = "adapter_model.bin"

# Fields of PEFT's LoraConfig that are read, and fields that do not affect inference. target_modules is among the latter
# because the tensor names identify the layers, fan_in_fan_out because it does not change A and B.
_READ = frozenset("peft_type r lora_alpha use_rslora rank_pattern alpha_pattern bias init_lora_weights".split())
_INERT = frozenset(
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules exclude_modules"
    " lora_dropout fan_in_fan_out layers_to_transform layers_pattern megatron_core loftq_config eva_config corda_config"
    " lora_ga_config qalora_group_size runtime_config ensure_weight_tying".split()
)
_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")  # initializations that keep the model's weights
_COSTLY = re.compile(r"\{|\(\?(?!:)")  # constructs whose compilation can take unbounded memory
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

LoraShapes = Mapping[str, tuple[int, int]]  # name of a linear layer -> (in_features, out_features)


class AdapterError(ValueError):
    """The files of an adapter are invalid. The message names the file and the field or tensor."""


@contextmanager
def _as_adapter_error() -> Iterator[None]:
    """Convert any exception to an AdapterError, so that it fails only the requests for this adapter."""
    try:
        yield
    except AdapterError:
        raise
    except Exception as error:
        raise AdapterError(f"{CONFIG} or {WEIGHTS}: {type(error).__name__}: {error}") from error


class Factors(NamedTuple):
    """The factors of one linear layer. The adapter adds b @ (a @ x) to its output."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank], multiplied by the scaling


class _Budget:
    """Remaining time for pattern matching."""

    def __init__(self) -> None:
        self.seconds = PATTERN_SECONDS


class PeftConfig(NamedTuple):
    """The fields of adapter_config.json that affect inference."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool  # rsLoRA
    budget: _Budget

    @property
    def max_rank(self) -> int:
        """The largest rank of any layer."""
        return max(self.rank, *self.rank_pattern.values()) if self.rank_pattern else self.rank

    def rank_of(self, layer: str) -> int:
        """Return the rank of a layer. Raises AdapterError if matching takes too long."""
        return self.rank_pattern.get(_matching_pattern(self.rank_pattern, layer, self.budget), self.rank)

    def scaling_of(self, layer: str) -> float:
        """Return the scaling of a layer: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
        alpha = self.alpha_pattern.get(_matching_pattern(self.alpha_pattern, layer, self.budget), self.alpha)
        rank = self.rank_of(layer)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _matching_pattern(patterns: Mapping[str, Any], layer: str, budget: _Budget) -> str:
    """Return the first pattern that matches the end of a layer's name, as PEFT does, or "" if none matches.

    Raises AdapterError if the time budget of the configuration is used up.
    """
    started = time.monotonic()
    try:
        for pattern in patterns:
            remaining = budget.seconds - (time.monotonic() - started)
            if remaining <= 0:
                raise TimeoutError
            if regex.match(rf"(.*\.)?({pattern})$", layer, timeout=remaining):
                return pattern
    except TimeoutError as error:
        shown = json.dumps(pattern)
        raise AdapterError(f"{CONFIG}: {shown}: takes more than {PATTERN_SECONDS:g} s to match") from error
    finally:
        budget.seconds -= time.monotonic() - started
    return ""


def signature(directory: Path) -> tuple[Any, ...]:
    """Return a value that changes whenever one of the files does. Raises AdapterError if one is missing."""
    with _as_adapter_error():
        return tuple(_stat(directory / name) for name in (CONFIG, WEIGHTS))


def _stat(file: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(file)
    except OSError as error:
        if file.name == WEIGHTS and file.with_name(PICKLE).exists():
            raise AdapterError(
                f"{PICKLE}: pickle files can execute code and are not read; save the adapter as {WEIGHTS}"
            ) from error
        name = file.name if file.parent.is_dir() else "its directory"
        raise AdapterError(f"{name}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise AdapterError(f"{file.name}: not a regular file")
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_config(directory: Path, max_rank: int) -> PeftConfig:
    """Read adapter_config.json. Raises AdapterError if it is malformed or uses an unsupported PEFT feature."""
    with _as_adapter_error():
        return _parse(_read(directory / CONFIG, MAX_CONFIG_BYTES), max_rank)


def read_adapter(name: str, directory: Path, shapes: LoraShapes, dtype: torch.dtype, max_rank: int) -> Adapter:
    """Load an adapter into host memory in `dtype`. Raises AdapterError.

    Reads and hashes whole files, so do not call it on a thread that must not block.
    """
    with _as_adapter_error():
        max_bytes = MAX_HEADER_BYTES + 4 * max_rank * sum(map(sum, shapes.values()))
        raw, data = _read(directory / CONFIG, MAX_CONFIG_BYTES), _read(directory / WEIGHTS, max_bytes)
        config = _parse(raw, max_rank)
        try:
            tensors = safetensors.torch.load(data)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise AdapterError(f"{WEIGHTS}: {error}") from error
        digests = blake2b(raw).digest() + blake2b(data).digest()
        digest = blake2b(digests, digest_size=32, person=b"paged_llm lora").digest()
        return Adapter(name, digest, config.max_rank, _factors(tensors, config, shapes, dtype))


def check_adapter(directory: Path, shapes: LoraShapes, max_rank: int) -> None:
    """Raise AdapterError if an adapter does not fit a model with these layers. Reads only its configuration and the
    header of its weights."""
    config = read_config(directory, max_rank)
    with _as_adapter_error():
        try:
            with safe_open(directory / WEIGHTS, framework="np") as file:
                stored = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"{WEIGHTS}: {error}") from error
        for name, shape in stored.items():
            layer, which = _parse_name(name, shapes)
            _check_shape(name, shape, which, config.rank_of(layer), shapes[layer])


def _read(file: Path, max_bytes: int) -> bytes:
    try:
        with file.open("rb") as opened:
            data = opened.read(max_bytes + 1)
    except OSError as error:
        raise AdapterError(f"{file.name}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise AdapterError(f"{file.name}: must be at most {max_bytes} bytes, the most that max_lora_rank allows")
    return data


def _parse(data: bytes, max_rank: int) -> PeftConfig:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise AdapterError(f"{CONFIG}: must contain one JSON object")
    if values.get("peft_type") != "LORA":
        raise _invalid("peft_type", values.get("peft_type"), 'must be "LORA"')
    if values.get("bias", "none") != "none":
        raise _invalid("bias", values["bias"], 'not supported; must be "none"')
    if not any(values.get("init_lora_weights", True) is value for value in (True, False, None)) and (
        values["init_lora_weights"] not in _INITIALIZATIONS
    ):
        limit = (
            "changes the model's own weights: not supported; save the adapter with PEFT's"
            " path_initial_model_for_weight_conversion"
        )
        raise _invalid("init_lora_weights", values["init_lora_weights"], limit)
    for field, value in values.items():
        if field not in _READ | _INERT and value:
            raise _invalid(field, value, "not supported")
    config = PeftConfig(
        _rank("r", values.get("r"), max_rank),
        _number("lora_alpha", values.get("lora_alpha")),
        _patterns("rank_pattern", values, lambda field, value: _rank(field, value, max_rank)),
        _patterns("alpha_pattern", values, _number),
        bool(values.get("use_rslora")),
        _Budget(),
    )
    return config


def _invalid(field: str, value: Any, limit: str) -> AdapterError:
    shown = json.dumps(value)
    return AdapterError(f"{CONFIG}: {field}={shown if len(shown) <= 80 else shown[:77] + '...'}: {limit}")


def _rank(field: str, value: Any, max_rank: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= max_rank:
        raise _invalid(field, value, f"must be 1..{max_rank} (max_lora_rank)")
    return value


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
        raise _invalid(field, value, f"must be a finite number, at most {MAX_ALPHA:g}")
    return value


def _patterns(field: str, values: Mapping[str, Any], read: Callable[[str, Any], Any]) -> dict[str, Any]:
    patterns = values.get(field) or {}
    if not isinstance(patterns, dict):
        raise _invalid(field, patterns, "must be an object")
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_CHARS or _COSTLY.search(pattern):
            limit = f"must be at most {MAX_PATTERN_CHARS} characters, without {{ and without (? except (?:"
            raise _invalid(field, pattern, limit)
        try:
            regex.compile(pattern)
        except regex.error as error:
            raise _invalid(field, pattern, f"not a valid regular expression: {error}") from error
    return {pattern: read(f"{field}[{json.dumps(pattern)}]", value) for pattern, value in patterns.items()}


def _factors(
    tensors: Mapping[str, Tensor], config: PeftConfig, shapes: LoraShapes, dtype: torch.dtype
) -> dict[str, Factors]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, which = _parse_name(name, shapes)
        pairs.setdefault(layer, {})[which] = _checked(name, tensor, which, config.rank_of(layer), shapes[layer])
    if not pairs:
        raise AdapterError(f"{WEIGHTS}: contains no tensor")
    factors = {}
    for layer, pair in pairs.items():
        if missing := {"A", "B"} - pair.keys():
            raise AdapterError(f"{WEIGHTS}: base_model.model.{layer}.lora_{missing.pop()}.weight is missing")
        b = pair["B"].float() * config.scaling_of(layer)
        scaled = Factors(pair["A"].to(dtype).contiguous(), b.to(dtype).contiguous())
        if not all(bool(factor.isfinite().all()) for factor in scaled):
            raise AdapterError(f"{WEIGHTS}: base_model.model.{layer}: contains values that are not finite in {dtype}")
        factors[layer] = scaled
    return factors


def _parse_name(name: str, shapes: LoraShapes) -> tuple[str, str]:
    match = _FACTOR.fullmatch(name)
    if match is None:
        raise AdapterError(
            f"{WEIGHTS}: {name}: not supported; must be lora_A.weight or lora_B.weight of base_model.model.LAYER"
        )
    if match[1] not in shapes:
        raise AdapterError(f"{WEIGHTS}: {name}: the model has no linear layer {match[1]} that can be adapted")
    return match[1], match[2]


def _checked(name: str, tensor: Tensor, which: str, rank: int, shape: tuple[int, int]) -> Tensor:
    _check_shape(name, list(tensor.shape), which, rank, shape)
    if tensor.dtype not in _DTYPES:
        raise AdapterError(f"{WEIGHTS}: {name}: has dtype {tensor.dtype}; must be float32, float16 or bfloat16")
    return tensor


def _check_shape(name: str, actual: list[int], which: str, rank: int, shape: tuple[int, int]) -> None:
    expected = [rank, shape[0]] if which == "A" else [shape[1], rank]
    if actual != expected:
        raise AdapterError(f"{WEIGHTS}: {name}: has shape {actual}; must be {expected}")
