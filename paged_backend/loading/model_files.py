"""What a model's files have to be before any library gets them.

Weights come from safetensors or GGUF alone: nothing is unpickled, and nothing outside of the directory is read because
a file inside it says so. What config.json describes is held against what the files have before memory is taken for it.
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
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from paged_backend.api.config import ConfigError
from paged_backend.models import rope
from paged_backend.utils.machine import available_memory

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
SUFFIX, GGUF, TEMPLATE = ".safetensors", ".gguf", ".jinja"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
MAX_BYTES = {".json": 256 << 20, ".model": 256 << 20, ".txt": 256 << 20, TEMPLATE: 1 << 20}  # of files, by suffix
MAX_LAYERS = 1024  # where no file shows how many there are
MAX_POSITIONS = 2**31 - 1
SLACK = 2  # times the weights that the files hold may be described: what is lacking is named once it is known
_SHARD = re.compile(r"(.+)-\d+-of-\d+\.safetensors")
_NUMBERS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # what weights that are not quantized may be in
_SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")


class Held(NamedTuple):
    """What the files of weights hold."""

    num_tensors: int
    num_elements: int
    num_bytes: int


def check_texts(directory: Path) -> None:
    """Raises ConfigError where a text of a model or tokenizer is no file, is too large, or is not the JSON that it has
    to be."""
    for path in sorted(directory.iterdir()):
        most = MAX_BYTES.get(path.suffix)
        if most is None:
            continue
        if not path.is_file():
            raise ConfigError(f"{path}: not a regular file")
        if (size := path.stat().st_size) > most:
            raise ConfigError(f"{path}: {size} bytes; must be at most {most}")
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
    """Raises ConfigError."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold one JSON object")
    return values


def check_weights(place: Path, *, quantized: bool) -> Held:
    """What the files of a directory, or a GGUF file, hold. Raises ConfigError for those that are not whole, are not
    what their index says, or hold what no weights are."""
    if place.suffix == GGUF:
        return _check_gguf(place)
    if (place / ADAPTER).exists():
        raise ConfigError(
            f"{place / ADAPTER}: an adapter is listed in multi_lora.json, and is no part of a model; merge it, or take"
            " it away"
        )
    held = Held(0, 0, 0)
    for path, expected in _files(place):
        found = dict(_header(path, quantized))
        if expected is not None and (other := sorted(expected ^ found.keys())):
            where = f"is in {INDEX} and not in the file" if other[0] in expected else f"is not in {INDEX}"
            raise ConfigError(f"{path}: {other[0]} {where}")
        sizes = held.num_tensors + len(found), held.num_elements + sum(found.values())
        held = Held(*sizes, held.num_bytes + path.stat().st_size)
    return held


def _files(place: Path) -> list[tuple[Path, set[str] | None]]:
    """Those that transformers reads, each with the tensors that an index says are in it."""
    named = read_object(place / CONFIG).get("transformers_weights")
    if named is None:
        named = WEIGHTS if (place / WEIGHTS).exists() else INDEX
    elif not isinstance(named, str) or not named.endswith((SUFFIX, f"{SUFFIX}.index.json")):
        raise ConfigError(f"{place / CONFIG}: transformers_weights={json.dumps(named)}: must name a {SUFFIX} file")
    path = _inside(place, named, place / CONFIG)
    if not path.exists() and named == INDEX:
        raise ConfigError(_none(place))
    return _shards(path) if named.endswith(".json") else [(_regular(path), None)]


def _none(place: Path) -> str:
    pickles = sorted(path.name for path in place.iterdir() if path.suffix in PICKLES)
    why = f"; {pickles[0]} is a pickle, which can run code and is not read: save the weights anew" if pickles else ""
    return f"{place}: no *{SUFFIX} file of weights: neither {WEIGHTS} nor {INDEX}{why}"


def _shards(index: Path) -> list[tuple[Path, set[str] | None]]:
    values = read_object(index)
    places = values.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(one, str) for one in places.values()):
        raise ConfigError(f"{index}: weight_map: must name the file of each tensor")
    if not isinstance(values.get("metadata"), dict):
        raise ConfigError(f"{index}: metadata: must be an object")
    shards: dict[str, set[str]] = {}
    for tensor, name in places.items():
        shards.setdefault(name, set()).add(tensor)
    for name in shards:
        if not name.endswith(SUFFIX):
            raise ConfigError(f"{index}: {json.dumps(name)}: weights are read from {SUFFIX} files alone")
    found = [(_regular(_inside(index.parent, name, index)), shards[name]) for name in sorted(shards)]
    for stray in sorted({path.name for path in index.parent.glob(f"*{SUFFIX}")} - shards.keys()):
        if _stem(stray) in {_stem(name) for name in shards} - {None}:
            raise ConfigError(f"{index.parent / stray}: not in {index.name}; a file of another model, or to be deleted")
    return found


def _stem(name: str) -> str | None:
    match = _SHARD.fullmatch(name)
    return match and match[1]


def _inside(directory: Path, name: str, said_by: Path) -> Path:
    """A file of the directory itself. Links may lead out of it, as those of the hub's cache do; names may not."""
    if Path(name).name != name:
        raise ConfigError(f"{said_by}: {json.dumps(name)}: must be the name of a file beside it")
    return directory / name


def _regular(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"{path}: " + ("not a regular file" if path.exists() else "no such file"))
    return path


def _header(path: Path, quantized: bool) -> Iterator[tuple[str, int]]:
    """Each tensor with the number of its elements."""
    try:
        with safe_open(path, framework="pt") as file:
            if (form := (file.metadata() or {}).get("format", "pt")) != "pt":
                raise ConfigError(f"{path}: format={json.dumps(form)}: must be weights of PyTorch's")
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                tensor = file.get_slice(name)
                kind, shape = tensor.get_dtype(), tensor.get_shape()
                if not quantized and name.endswith("weight") and kind not in _NUMBERS:
                    raise ConfigError(
                        f"{path}: {name}: is in {kind}; must be in one of {', '.join(_NUMBERS)}, since {CONFIG} has no"
                        " quantization_config"
                    )
                yield name, torch.Size(shape).numel()
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_gguf(path: Path) -> Held:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(f"{path}: needs the package gguf: {error}") from error
    try:
        reader = GGUFReader(path)
        tensors = sorted(reader.tensors, key=lambda one: int(one.data_offset))
        spans = [(int(one.data_offset), int(one.data_offset + one.n_bytes)) for one in tensors]
        elements = sum(int(one.n_elements) for one in tensors)
    except Exception as error:  # it reads past the end, or finds counts and types that there are not
        raise ConfigError(f"{path}: not a whole GGUF file: {type(error).__name__}: {error}") from error
    size = path.stat().st_size
    for tensor, (_, end), (start, _) in zip(tensors, spans, [*spans[1:], (size, size)], strict=True):
        if tensor.tensor_type.name in ("I8", "I16", "I32", "I64"):
            raise ConfigError(f"{path}: {tensor.name}: is in {tensor.tensor_type.name}, which no weights are")
        if end > start or (start < size and start - end >= reader.alignment):
            raise ConfigError(f"{path}: {tensor.name}: ends at byte {end}, and what follows begins at {start}")
    return Held(len(tensors), elements, size)


def check_config(place: Path, config: PretrainedConfig) -> None:
    """Raises ConfigError for quantized weights of a kind that nobody knows, which transformers would take for plain
    ones."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None or place.suffix == GGUF:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    loads_in_bits = isinstance(quantization, dict) and (
        quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
    )
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING and not loads_in_bits:
        shown = json.dumps(method, default=str)
        raise ConfigError(f"{place / CONFIG}: quantization_config.quant_method={shown}: unknown")


def check_sizes(place: Path, config: PretrainedConfig, held: Held | None, *, dtype: torch.dtype, trust: bool) -> None:
    """Raises ConfigError for a configuration that has no layers, or describes more weights than the files hold, or,
    where there are no files (held is None), than the memory has room for."""
    text, name = config.get_text_config(), place / CONFIG if place.suffix != GGUF else place
    packed = getattr(config, "quantization_config", None) is not None and place.suffix != GGUF  # several in an element
    most = 2**31 - 1 if held is None else 8 * held.num_bytes if packed else held.num_elements
    layers = MAX_LAYERS if held is None else held.num_tensors
    _check_number(name, text, "num_hidden_layers", layers)
    _check_number(name, text, "max_position_embeddings", MAX_POSITIONS, least=2)  # a prompt's, and an output's
    for field in _SIZES:
        _check_number(name, text, field, most)
    _check_rope(name, text)
    described = _num_weights(name, config, trust)
    if held is None:
        room = available_memory()
        if described * dtype.itemsize > room:
            raise ConfigError(f"{name}: describes {described} weights in {dtype}; there are {room} bytes of memory")
    elif described > (most if packed else SLACK * most):
        raise ConfigError(f"{name}: describes {described} weights; the files hold {held.num_elements}")


def _check_number(file: Path, config: PretrainedConfig, field: str, most: int, *, least: int = 1) -> None:
    values = getattr(config, field, None)
    for value in values if isinstance(values, list) else [values]:  # some models have one for each layer
        if isinstance(value, int) and not least <= value <= most:
            raise ConfigError(f"{file}: {field}={value}: must be {least}..{most}")


def _check_rope(file: Path, config: PretrainedConfig) -> None:
    for one in rope.parameters(config):
        theta = one.get("rope_theta")
        if theta is not None and not (isinstance(theta, int | float) and 0 < theta < math.inf):
            raise ConfigError(f"{file}: rope_theta={json.dumps(theta, default=str)}: must be a positive number")


def _num_weights(file: Path, config: PretrainedConfig, trust: bool) -> int:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation="eager", trust_remote_code=trust
            )
    except Exception as error:  # whatever a model's own code makes of numbers that contradict each other
        raise ConfigError(f"{file}: makes no model: {type(error).__name__}: {error}") from error
    return sum(parameter.numel() for parameter in model.parameters())


def check_found(place: Path, found: dict[str, Iterable[Any]], *, quantized: bool) -> None:
    """Raises ConfigError for tensors that the model lacks or that the files have too many of: transformers would fill
    the first at random, and leave out the others. quantized: some formats have tensors beside the weights."""
    named = next((place / name for name in (WEIGHTS, INDEX) if (place / name).exists()), place)
    missing = sorted(found["missing_keys"]) + sorted(key for key, *_ in found["mismatched_keys"])
    if missing:
        raise ConfigError(f"{named}: lacks {_shown(missing)}, in the shape of {CONFIG}")
    if not quantized and (extra := sorted(found["unexpected_keys"])):
        raise ConfigError(f"{named}: holds {_shown(extra)}, for which {CONFIG} has no place")


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
