"""LoRA adapters as PEFT keeps them in a directory: adapter_config.json and adapter_model.safetensors.

What a linear layer gives, y = W x, becomes y = W x + scaling * B (A x). Whatever else a configuration asks for would
change the result in another way, and is refused by name.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import regex
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from paged_backend.api.request import Adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 64 << 20  # of the weights' file beside the tensors
PATTERN_SECONDS = 1.0  # in which all expressions of a configuration have to match the names of layers or not
MAX_PATTERN_CHARS = 1000
MAX_ALPHA = 1e30
PICKLE = "adapter_model.bin"

# Fields of PEFT's LoraConfig that are read, or say how an adapter came to be and not what it computes: the names in the
# file tell which layers it is for, and A and B are the same whichever way round a layer keeps its weight.
_READ = frozenset("peft_type r lora_alpha use_rslora rank_pattern alpha_pattern bias init_lora_weights".split())
_INERT = frozenset(
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules exclude_modules"
    " lora_dropout fan_in_fan_out layers_to_transform layers_pattern megatron_core loftq_config eva_config corda_config"
    " lora_ga_config qalora_group_size runtime_config ensure_weight_tying".split()
)
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")  # the others change the model's own weights
_COSTLY = re.compile(r"\{|\(\?(?!:)")  # what may take any memory to compile
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

LoraShapes = Mapping[str, tuple[int, int]]  # by name of a linear layer: in_features, out_features


class AdapterError(ValueError):
    """Files that cannot be used; the message names the file, and the field or the tensor."""


@contextmanager
def _no_other_error() -> Iterator[None]:
    """Whatever goes wrong with one adapter's files is its own."""
    try:
        yield
    except AdapterError:
        raise
    except Exception as error:
        raise AdapterError(f"{CONFIG} or {WEIGHTS}: {type(error).__name__}: {error}") from error


class Factors(NamedTuple):
    """What an adapter adds to one linear layer: b @ (a @ x)."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank], with the scaling in it


class _Budget:
    """Seconds that are left."""

    def __init__(self) -> None:
        self.left = PATTERN_SECONDS


class PeftConfig(NamedTuple):
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilised: bool  # rsLoRA
    budget: _Budget

    @property
    def max_rank(self) -> int:
        return max(self.rank, *self.rank_pattern.values()) if self.rank_pattern else self.rank

    def rank_of(self, layer: str) -> int:
        return self.rank_pattern.get(_pattern(self.rank_pattern, layer, self.budget), self.rank)

    def scaling_of(self, layer: str) -> float:
        alpha = self.alpha_pattern.get(_pattern(self.alpha_pattern, layer, self.budget), self.alpha)
        rank = self.rank_of(layer)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def _pattern(patterns: Mapping[str, Any], layer: str, budget: _Budget) -> str:
    """The first expression that matches the end of a layer's name, as PEFT looks for it. Raises AdapterError where all
    of them have taken too long."""
    began = time.monotonic()
    try:
        for one in patterns:
            left = budget.left - (time.monotonic() - began)
            if left <= 0:
                raise TimeoutError
            if regex.match(rf"(.*\.)?({one})$", layer, timeout=left):
                return one
    except TimeoutError as error:
        shown = json.dumps(one)
        raise AdapterError(f"{CONFIG}: {shown}: takes more than {PATTERN_SECONDS:g} s to match") from error
    finally:
        budget.left -= time.monotonic() - began
    return ""


def signature(directory: Path) -> tuple[Any, ...]:
    """What changes when one of the files does. Raises AdapterError where one is missing."""
    with _no_other_error():
        return tuple(_stat(directory / name) for name in (CONFIG, WEIGHTS))


def _stat(file: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(file)
    except OSError as error:
        if file.name == WEIGHTS and file.with_name(PICKLE).exists():
            raise AdapterError(
                f"{PICKLE}: is a pickle, which can run code and is not read; save the adapter as {WEIGHTS}"
            ) from error
        raise AdapterError(f"{file.name}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise AdapterError(f"{file.name}: not a regular file")
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_config(directory: Path, max_rank: int) -> PeftConfig:
    """Raises AdapterError for what is malformed, or asks for more than the product of two matrices."""
    with _no_other_error():
        return _parse(_read(directory / CONFIG, MAX_CONFIG_BYTES), max_rank)


def read_adapter(name: str, directory: Path, shapes: LoraShapes, dtype: torch.dtype, max_rank: int) -> Adapter:
    """All of an adapter, in the host's memory, in `dtype`. Raises AdapterError.

    Takes the time to read and hash its files: not for a thread on which others wait.
    """
    with _no_other_error():
        most = MAX_HEADER_BYTES + 4 * max_rank * sum(map(sum, shapes.values()))
        raw, data = _read(directory / CONFIG, MAX_CONFIG_BYTES), _read(directory / WEIGHTS, most)
        config = _parse(raw, max_rank)
        try:
            tensors = safetensors.torch.load(data)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise AdapterError(f"{WEIGHTS}: {error}") from error
        both = blake2b(raw).digest() + blake2b(data).digest()
        digest = blake2b(both, digest_size=32, person=b"paged_llm lora").digest()
        return Adapter(name, digest, config.max_rank, _factors(tensors, config, shapes, dtype))


def _read(file: Path, most: int) -> bytes:
    try:
        with file.open("rb") as opened:
            data = opened.read(most + 1)
    except OSError as error:
        raise AdapterError(f"{file.name}: {error.strerror}") from error
    if len(data) > most:
        raise AdapterError(f"{file.name}: must be at most {most} bytes, which no adapter of max_lora_rank exceeds")
    return data


def _parse(data: bytes, max_rank: int) -> PeftConfig:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise AdapterError(f"{CONFIG}: must hold one JSON object")
    if values.get("peft_type") != "LORA":
        raise _wrong("peft_type", values.get("peft_type"), 'must be "LORA"')
    if values.get("bias", "none") != "none":
        raise _wrong("bias", values["bias"], 'not supported; must be "none"')
    if not any(values.get("init_lora_weights", True) is one for one in (True, False, None)) and (
        values["init_lora_weights"] not in _INITIALISATIONS
    ):
        raise _wrong("init_lora_weights", values["init_lora_weights"], "changes the model's own weights: not supported;"
                     " save the adapter with PEFT's path_initial_model_for_weight_conversion")  # fmt: skip
    for field, value in values.items():
        if field not in _READ | _INERT and value:
            raise _wrong(field, value, "not supported")
    config = PeftConfig(
        _rank("r", values.get("r"), max_rank),
        _number("lora_alpha", values.get("lora_alpha")),
        _patterns("rank_pattern", values, lambda field, value: _rank(field, value, max_rank)),
        _patterns("alpha_pattern", values, _number),
        bool(values.get("use_rslora")),
        _Budget(),
    )
    return config


def _wrong(field: str, value: Any, limit: str) -> AdapterError:
    shown = json.dumps(value)
    return AdapterError(f"{CONFIG}: {field}={shown if len(shown) <= 80 else shown[:77] + '...'}: {limit}")


def _rank(field: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _wrong(field, value, f"must be 1..{most} (max_lora_rank)")
    return value


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
        raise _wrong(field, value, f"must be a finite number, at most {MAX_ALPHA:g}")
    return value


def _patterns(field: str, values: Mapping[str, Any], read: Any) -> dict[str, Any]:
    patterns = values.get(field) or {}
    if not isinstance(patterns, dict):
        raise _wrong(field, patterns, "must be an object")
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_CHARS or _COSTLY.search(pattern):
            raise _wrong(field, pattern, f"must be at most {MAX_PATTERN_CHARS} characters without {{ and (?, but (?:")
        try:
            regex.compile(pattern)
        except regex.error as error:
            raise _wrong(field, pattern, f"no regular expression: {error}") from error
    return {pattern: read(f"{field}[{json.dumps(pattern)}]", value) for pattern, value in patterns.items()}


def _factors(
    tensors: Mapping[str, Tensor], config: PeftConfig, shapes: LoraShapes, dtype: torch.dtype
) -> dict[str, Factors]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, which = _place(name, shapes)
        found.setdefault(layer, {})[which] = _checked(name, tensor, which, config.rank_of(layer), shapes[layer])
    if not found:
        raise AdapterError(f"{WEIGHTS}: holds no tensor")
    factors = {}
    for layer, pair in found.items():
        if lacking := {"A", "B"} - pair.keys():
            raise AdapterError(f"{WEIGHTS}: lacks base_model.model.{layer}.lora_{lacking.pop()}.weight")
        b = pair["B"].float() * config.scaling_of(layer)
        made = Factors(pair["A"].to(dtype).contiguous(), b.to(dtype).contiguous())
        if not all(bool(one.isfinite().all()) for one in made):
            raise AdapterError(f"{WEIGHTS}: base_model.model.{layer}: holds numbers that are not finite in {dtype}")
        factors[layer] = made
    return factors


def _place(name: str, shapes: LoraShapes) -> tuple[str, str]:
    match = _FACTOR.fullmatch(name)
    if match is None:
        raise AdapterError(
            f"{WEIGHTS}: {name}: not supported; must be lora_A.weight or lora_B.weight of base_model.model.LAYER"
        )
    if match[1] not in shapes:
        raise AdapterError(f"{WEIGHTS}: {name}: the model has no linear layer {match[1]} that can be adapted")
    return match[1], match[2]


def _checked(name: str, tensor: Tensor, which: str, rank: int, shape: tuple[int, int]) -> Tensor:
    wanted = [rank, shape[0]] if which == "A" else [shape[1], rank]
    if list(tensor.shape) != wanted:
        raise AdapterError(f"{WEIGHTS}: {name}: has shape {list(tensor.shape)}; must be {wanted}")
    if tensor.dtype not in _DTYPES:
        raise AdapterError(f"{WEIGHTS}: {name}: is in {tensor.dtype}; must be in 32 or 16 bits")
    return tensor
