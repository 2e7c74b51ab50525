"""Check a model's files before any library reads them.

Weights are read from safetensors or GGUF only: nothing is unpickled, and files inside the directory cannot refer to
files outside of it. The sizes in config.json are compared with those of the weight files before memory is allocated.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from paged_backend.api.errors import ConfigError
from paged_backend.loading import conversion
from paged_backend.models import rope
from paged_backend.utils.machine import available_memory

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
QUANTIZATION = "quantization_config"  # field of config.json
WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
SUFFIX, GGUF, TEMPLATE = ".safetensors", ".gguf", ".jinja"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
MAX_BYTES = {".json": 256 << 20, ".model": 256 << 20, ".txt": 256 << 20, TEMPLATE: 1 << 20}  # limits by file suffix
MAX_LAYERS = 1024  # limit without weight files, which imply a limit otherwise
MAX_POSITIONS = 2**31 - 1
# Factor by which config.json may exceed the weights in the files; `check_loading_info` then names the missing ones.
SLACK = 2
_SHARD = re.compile(r"(.+)-\d+-of-\d+\.safetensors")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # dtypes of weights that are not quantized
_GGUF_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")


class WeightTotals(NamedTuple):
    """The totals over all weight files of a model."""

    num_tensors: int
    num_elements: int
    num_bytes: int
    is_quantized: bool = False  # of a GGUF file: whether it has quantized weights


def check_text_files(directory: Path) -> None:
    """Raise ConfigError if a text file of a model or tokenizer is not a regular file, too large, or invalid JSON."""
    for path in sorted(directory.iterdir()):
        limit = MAX_BYTES.get(path.suffix)
        if limit is None:
            continue
        if not path.is_file():
            raise ConfigError(f"{path}: not a regular file")
        if (size := path.stat().st_size) > limit:
            raise ConfigError(f"{path}: {size} bytes; must be at most {limit}")
        if path.suffix == TEMPLATE:
            _check_utf8(path)
    for name in (CONFIG, GENERATION, TOKENIZER, SPECIAL_TOKENS, ADDED_TOKENS):
        if (directory / name).exists():
            read_object(directory / name)


def _check_utf8(path: Path) -> None:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ConfigError."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must contain one JSON object")
    return values


def check_weights(model_path: Path, *, quantized: bool) -> WeightTotals:
    """Return the totals of the weight files in a directory, or of a GGUF file.

    Raises ConfigError for files that are truncated, do not match their index, or contain dtypes that are not weights.
    """
    if model_path.suffix == GGUF:
        return check_gguf(model_path)
    if (model_path / ADAPTER).exists():
        raise ConfigError(
            f"{model_path / ADAPTER}: adapters belong in multi_lora.json and not in a model; merge or remove it"
        )
    totals = WeightTotals(0, 0, 0)
    for path, expected in _weight_files(model_path):
        found = dict(_header(path, quantized))
        if expected is not None and (difference := sorted(expected ^ found.keys())):
            where = f"is in {INDEX} but not in the file" if difference[0] in expected else f"is not in {INDEX}"
            raise ConfigError(f"{path}: {difference[0]} {where}")
        totals = WeightTotals(
            totals.num_tensors + len(found),
            totals.num_elements + sum(found.values()),
            totals.num_bytes + path.stat().st_size,
        )
    return totals


def _weight_files(model_path: Path) -> list[tuple[Path, set[str] | None]]:
    """Return the files that transformers reads, each with its tensors according to the index, if there is one."""
    named = read_object(model_path / CONFIG).get("transformers_weights")
    if named is None:
        named = WEIGHTS if (model_path / WEIGHTS).exists() else INDEX
    elif not isinstance(named, str) or not named.endswith((SUFFIX, f"{SUFFIX}.index.json")):
        raise ConfigError(f"{model_path / CONFIG}: transformers_weights={json.dumps(named)}: must name a {SUFFIX} file")
    path = _inside(model_path, named, model_path / CONFIG)
    if not path.exists() and named == INDEX:
        raise ConfigError(_no_weights(model_path))
    return _shards(path) if named.endswith(".json") else [(_regular(path), None)]


def weight_files(model_path: Path) -> list[Path]:
    """Return the files with the weights. Raises ConfigError."""
    return [path for path, _ in _weight_files(model_path)]


def read_tensor(model_path: Path, name: str) -> torch.Tensor | None:
    """Return a tensor of the weights that `check_weights` has checked, or None if they have no such tensor."""
    for path, expected in _weight_files(model_path):
        if expected is None or name in expected:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118 (not a mapping)
    return None


def open_weights(model_path: Path) -> dict[Path, Any]:
    """Return the weight files that `check_weights` has checked, opened by safetensors."""
    return {path: safe_open(path, framework="pt").__enter__() for path, _ in _weight_files(model_path)}


def _no_weights(model_path: Path) -> str:
    pickles = sorted(path.name for path in model_path.iterdir() if path.suffix in PICKLES)
    error = f"{model_path}: no weights: neither {WEIGHTS} nor {INDEX} exists"
    if model_path.parent.name == "snapshots":  # of the hub's cache, which gets no pickles
        name = model_path.parents[1].name.removeprefix("models--").replace("--", "/", 1)
        command = conversion.from_hub(name, name.rpartition("/")[2])
        return f"{error}; convert the model and serve the new directory: {command}"
    if not pickles:
        return error
    if named := [name for name in pickles if name.startswith(conversion.PREFIX)]:
        hint = f"convert it: {conversion.in_place(model_path)}"
    elif len(pickles) == 1:
        hint = f"convert it, if it maps names to tensors: {conversion.of_tensors(model_path / pickles[0])}"
    else:
        hint = f"save it as {SUFFIX}"
    return f"{error}; {(named or pickles)[0]} is a pickle file, which can execute code and is not read; {hint}"


def _shards(index: Path) -> list[tuple[Path, set[str] | None]]:
    values = read_object(index)
    places = values.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{index}: weight_map: must map each tensor to a file name")
    if not isinstance(values.get("metadata"), dict):
        raise ConfigError(f"{index}: metadata: must be an object")
    shards: dict[str, set[str]] = {}
    for tensor, name in places.items():
        shards.setdefault(name, set()).add(tensor)
    for name in shards:
        if not name.endswith(SUFFIX):
            raise ConfigError(f"{index}: {json.dumps(name)}: weights are only read from {SUFFIX} files")
    found: list[tuple[Path, set[str] | None]] = [
        (_regular(_inside(index.parent, name, index)), shards[name]) for name in sorted(shards)
    ]
    for stray in sorted({path.name for path in index.parent.glob(f"*{SUFFIX}")} - shards.keys()):
        if _stem(stray) in {_stem(name) for name in shards} - {None}:
            raise ConfigError(f"{index.parent / stray}: not in {index.name}; remove this file of another model")
    return found


def _stem(name: str) -> str | None:
    match = _SHARD.fullmatch(name)
    return match and match[1]


def _inside(directory: Path, name: str, source: Path) -> Path:
    """Return the path of a file in the directory. Links may point outside, as in the hub's cache; names may not."""
    if Path(name).name != name:
        raise ConfigError(f"{source}: {json.dumps(name)}: must be a file name without a directory")
    return directory / name


def _regular(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"{path}: " + ("not a regular file" if path.exists() else "no such file"))
    return path


def _header(path: Path, quantized: bool) -> Iterator[tuple[str, int]]:
    """Yield each tensor of a safetensors file with its number of elements."""
    try:
        with safe_open(path, framework="pt") as file:
            if (form := (file.metadata() or {}).get("format", "pt")) != "pt":
                raise ConfigError(f'{path}: format={json.dumps(form)}: must be "pt"')
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_slice(name)
                kind, shape = tensor.get_dtype(), tensor.get_shape()
                if not quantized and name.endswith("weight") and kind not in _FLOAT_DTYPES:
                    raise ConfigError(
                        f"{path}: {name}: has dtype {kind}; must be one of {', '.join(_FLOAT_DTYPES)}, because"
                        f" {CONFIG} has no quantization_config"
                    )
                yield name, torch.Size(shape).numel()
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error


def check_gguf(path: Path) -> WeightTotals:
    """Return the totals of a GGUF file. Raises ConfigError if it is truncated, damaged or of another format."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(f"{path}: reading it requires the package gguf: {error}") from error
    try:
        reader = GGUFReader(path)
        tensors = sorted(reader.tensors, key=lambda tensor: int(tensor.data_offset))
        spans = [(int(t.data_offset), int(t.data_offset + t.n_bytes)) for t in tensors]
        elements = sum(int(t.n_elements) for t in tensors)
    except Exception as error:  # e.g. reads past the end, invalid counts or types
        raise ConfigError(f"{path}: is truncated, damaged or no GGUF file: {error}") from error
    if not tensors:
        raise ConfigError(f"{path}: contains no tensors")
    size = path.stat().st_size
    for tensor, (_, end), (start, _) in zip(tensors, spans, [*spans[1:], (size, size)], strict=True):
        if tensor.tensor_type.name in ("I8", "I16", "I32", "I64"):
            raise ConfigError(f"{path}: {tensor.name}: unsupported dtype {tensor.tensor_type.name}")
        if end > start or (start < size and start - end >= reader.alignment):
            raise ConfigError(
                f"{path}: {tensor.name}: ends at byte {end}; the next tensor or end of file is at {start}"
            )
    is_quantized = any(tensor.tensor_type.name not in _GGUF_FLOAT_TYPES for tensor in tensors)
    return WeightTotals(len(tensors), elements, size, is_quantized)


def check_config(model_path: Path, config: PretrainedConfig) -> None:
    """Raise ConfigError for an unknown quantization method, which transformers would load as plain weights."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None or model_path.suffix == GGUF:
        return
    is_dict = isinstance(quantization, dict)
    method = quantization.get("quant_method") if is_dict else getattr(quantization, "quant_method", None)
    loads_in_bits = is_dict and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit"))
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING and not loads_in_bits:
        shown = json.dumps(method, default=str)
        raise ConfigError(f"{model_path / CONFIG}: quantization_config.quant_method={shown}: unknown")


def check_sizes(
    model_path: Path,
    config: PretrainedConfig,
    totals: WeightTotals | None,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool,
    kind: Any = AutoModelForCausalLM,
) -> int:
    """Return the number of weights that the configuration describes. Raises ConfigError if it has no layers or
    describes more weights than the files contain.

    Without weight files (`totals` is None), the weights in `dtype` must fit the available memory instead. kind: class
    of transformers that finds the model's class.
    """
    text, name = config.get_text_config(), model_path / CONFIG if model_path.suffix != GGUF else model_path
    packed = (
        getattr(config, "quantization_config", None) is not None and model_path.suffix != GGUF
    )  # quantized weights hold several elements in one
    limit = 2**31 - 1 if totals is None else 8 * totals.num_bytes if packed else totals.num_elements
    layers = MAX_LAYERS if totals is None else totals.num_tensors
    _check_number(name, text, "num_hidden_layers", layers)
    _check_number(name, text, "max_position_embeddings", MAX_POSITIONS, minimum=2)  # one prompt, one output token
    for layer in _layer_configs(text):
        for field in _SIZES:
            _check_number(name, layer, field, limit)
    _check_rope(name, text)
    described = _num_weights(name, config, trust_remote_code, kind)
    if totals is None:
        memory = available_memory()
        if described * dtype.itemsize > memory:
            raise ConfigError(f"{name}: describes {described} weights in {dtype}; available memory is {memory} bytes")
    elif described > (limit if packed else SLACK * limit):
        raise ConfigError(f"{name}: describes {described} weights; the files contain {totals.num_elements}")
    return described


def _layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the configuration of each layer if sizes differ between layers, as in Gemma 4, else the model's."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def _check_number(file: Path, config: PretrainedConfig, field: str, maximum: int, *, minimum: int = 1) -> None:
    values = getattr(config, field, None)
    for value in values if isinstance(values, list) else [values]:  # some models have one value per layer
        if isinstance(value, int) and not minimum <= value <= maximum:
            raise ConfigError(f"{file}: {field}={value}: must be {minimum}..{maximum}")


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


def _num_weights(file: Path, config: PretrainedConfig, trust_remote_code: bool, kind: Any) -> int:
    """Count the weights of the model that the configuration describes."""
    try:
        model = described_model(config, trust_remote_code, kind)
    except Exception as error:
        raise ConfigError(f"{file}: does not describe a valid model: {type(error).__name__}: {error}") from error
    return sum(parameter.numel() for parameter in model.parameters())


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
