"""Check a model's files before any library reads them.

Weights are read from safetensors or GGUF only: nothing is unpickled, and files inside the directory cannot refer to
files outside of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from paged_backend.api.errors import ConfigError
from paged_backend.files import conversion
from paged_backend.files.gguf_header import read_header

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
QUANTIZATION = "quantization_config"  # field of config.json
MODULES = "modules.json"  # file of sentence-transformers
WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
SUFFIX, GGUF, TEMPLATE = ".safetensors", ".gguf", ".jinja"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
MAX_BYTES = {".json": 256 << 20, ".model": 256 << 20, ".txt": 256 << 20, TEMPLATE: 1 << 20}  # limits by file suffix
_SHARD = re.compile(r"(.+)-\d+-of-\d+\.safetensors")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # dtypes of weights that are not quantized
_GGUF_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class WeightTotals(NamedTuple):
    """The totals over all weight files of a model."""

    num_tensors: int
    num_elements: int
    num_bytes: int
    is_quantized: bool = False  # whether a GGUF file has quantized weights


def possible_paths(name: str, root: Path) -> list[Path]:
    """Return where a path in the options may be: relative to `root`, or to the working directory."""
    return [base / Path(name).expanduser() for base in (root, Path.cwd())]


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


def check_weights(
    model_path: Path, *, quantized: bool, shapes: Mapping[str, tuple[int, ...]] | None = None, layers: object = None
) -> WeightTotals:
    """Return the totals of the weight files in a directory, or of a GGUF file.

    shapes: shapes that the configuration implies, by the last two parts of a tensor's name. layers: number of layers,
    if it is known and they are numbered as in Llama.

    Raises ConfigError for files that are truncated, do not match their index, contain dtypes that are not weights, or
    have other shapes or layers.
    """
    if model_path.suffix == GGUF:
        return check_gguf(model_path)
    if (model_path / ADAPTER).exists():
        raise ConfigError(
            f"{model_path / ADAPTER}: adapters belong in multi_lora.json and not in a model; merge or remove it"
        )
    totals, numbered = WeightTotals(0, 0, 0), 0
    for path, expected in files_with_tensors(model_path):
        tensors = dict(_header(path, quantized))
        _check_shapes(model_path / CONFIG, path, tensors, shapes or {})
        numbered = max(numbered, *(int(number[1]) + 1 for name in tensors if (number := _LAYER.search(name))), 0)
        if expected is not None and (difference := sorted(expected ^ tensors.keys())):
            where = f"is in {INDEX} but not in the file" if difference[0] in expected else f"is not in {INDEX}"
            raise ConfigError(f"{path}: {difference[0]} {where}")
        totals = WeightTotals(
            totals.num_tensors + len(tensors),
            totals.num_elements + sum(math.prod(shape) for shape in tensors.values()),
            totals.num_bytes + path.stat().st_size,
        )
    if isinstance(layers, int) and numbered not in (0, layers):
        raise ConfigError(f"{model_path / CONFIG}: num_hidden_layers={layers}: the weights have {numbered} layers")
    return totals


def _check_shapes(
    config: Path, path: Path, tensors: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> None:  # fmt: skip
    for name, shape in tensors.items():
        implied = shapes.get(".".join(name.split(".")[-2:]), shape)
        if implied != shape:
            raise ConfigError(f"{path}: {name}: has shape {[*shape]}; the sizes in {config} imply {[*implied]}")


def files_with_tensors(model_path: Path) -> list[tuple[Path, set[str] | None]]:
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


def has_weights(model_path: Path) -> bool:
    """Return whether a directory has weights; without them a model may get random weights."""
    named = read_object(model_path / CONFIG).get("transformers_weights")
    return named is not None or any((model_path / name).exists() for name in (WEIGHTS, INDEX))


def weight_files(model_path: Path) -> list[Path]:
    """Return the files with the weights. Raises ConfigError."""
    return [path for path, _ in files_with_tensors(model_path)]


def _no_weights(model_path: Path) -> str:
    pickles = sorted(path.name for path in model_path.iterdir() if path.suffix in PICKLES)
    error = f"{model_path}: no weights: neither {WEIGHTS} nor {INDEX} exists"
    if model_path.parent.name == "snapshots":  # in the hub's cache, which gets no pickles
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
    files: list[tuple[Path, set[str] | None]] = [
        (_regular(_inside(index.parent, name, index)), shards[name]) for name in sorted(shards)
    ]
    for stray in sorted({path.name for path in index.parent.glob(f"*{SUFFIX}")} - shards.keys()):
        if _stem(stray) in {_stem(name) for name in shards} - {None}:
            raise ConfigError(f"{index.parent / stray}: not in {index.name}; remove this file of another model")
    return files


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


def _header(path: Path, quantized: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each tensor of a safetensors file with its shape."""
    try:
        with safe_open(path, framework="np") as file:  # reads the header only, without torch
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
                yield name, tuple(shape)
    except SafetensorError as error:
        raise ConfigError(f"{path}: is truncated or damaged; copy it again: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error


def check_gguf(path: Path) -> WeightTotals:
    """Return the totals of a GGUF file. Raises ConfigError if it is truncated, damaged or of another format."""
    tensors, alignment = read_header(path)
    if not tensors:
        raise ConfigError(f"{path}: contains no tensors")
    size = path.stat().st_size
    for tensor, start in zip(tensors, [*(other.start for other in tensors[1:]), size], strict=True):
        end = tensor.start + tensor.nbytes
        if tensor.type in ("I8", "I16", "I32", "I64"):
            raise ConfigError(f"{path}: {tensor.name}: unsupported dtype {tensor.type}")
        if end > start or (start < size and start - end >= alignment):
            raise ConfigError(
                f"{path}: {tensor.name}: ends at byte {end}; the next tensor or end of file is at {start}"
            )
    is_quantized = any(tensor.type not in _GGUF_FLOAT_TYPES for tensor in tensors)
    return WeightTotals(len(tensors), sum(tensor.num_elements for tensor in tensors), size, is_quantized)
