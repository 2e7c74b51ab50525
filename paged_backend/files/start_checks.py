"""Checks of a start that need only the options, the machine, directories, config.json and the headers of files.

Needs no torch, whose import takes seconds: `paged serve` checks this before it starts a server, and the engine before
it imports torch. What needs the model's layers is checked by the engine, also before weights are read.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from paged_backend.api.config import (
    AUTO_BLOCK_SIZES,
    DTYPES,
    HUB_NAME,
    INT4_BLOCK_SIZE,
    KV_CACHE_DTYPES,
    STORES,
    EngineConfig,
)
from paged_backend.api.errors import ConfigError
from paged_backend.api.options import invalid_option
from paged_backend.api.redis_address import RedisAddress
from paged_backend.api.sizes import GIB, MIB
from paged_backend.files import hub, model_files, transformers_tables
from paged_backend.files.config_fields import check_values, llama_shapes, unsupported_fields, unsupported_model
from paged_backend.files.generation_config import check_defaults
from paged_backend.files.model_files import CONFIG, GGUF, MODULES, QUANTIZATION, possible_paths
from paged_backend.files.quantization_fields import check_known, check_settings
from paged_backend.files.tokenizer_files import FAST, check_template, check_tokenizer
from paged_backend.utils.machine import available_memory, gpu_limit, has_gpu

ROOT = Path(__file__).resolve().parents[2]  # the repository, or the directory in which the package is installed
HEADS = ("num_attention_heads", "num_key_value_heads")
ALREADY_QUANTIZED = "the model's weights are quantized already; leave it out"
FULL_ATTENTION = ("llama", "qwen2", "qwen3")  # families whose layers store all keys and values, as their fields say


def check_start(config: EngineConfig, root: Path = ROOT) -> None:
    """Raise ConfigError for a start that cannot succeed. root: where relative paths of options begin."""
    _check_gpus(config)
    _check_memory(config)
    check_host_pool(config, on_cpu=_runs_on_cpu(config))
    if config.disk_cache_dir is not None:
        check_disk_cache(config)
    template = None if config.chat_template is None else read_template(config.chat_template, root)
    on_cpu = True if _runs_on_cpu(config) else False if config.device == "cuda" else None
    _check_pool(config, check_models(config, root, on_cpu=on_cpu))
    _check_hub(config, root, on_cpu)
    path = find_local(config.model, root)
    if path:
        check_defaults(config.generation_config, root, path)
    tokenizer = find_local(config.tokenizer, root) if config.tokenizer else path
    if tokenizer and tokenizer != path and tokenizer.is_dir():  # the model's files are checked above
        model_files.check_text_files(tokenizer)
    if tokenizer and tokenizer.suffix != GGUF and not config.trust_remote_code:
        check_tokenizer(tokenizer)
    if tokenizer or template:
        check_template(tokenizer, template)


def check_models(config: EngineConfig, root: Path = ROOT, *, on_cpu: bool | None) -> Mapping[str, Any]:
    """Return the fields of the model's config.json that describe its text decoder; empty if they are not known.

    Raises ConfigError for the files of a model or draft model that is not supported, or not with these options.

    on_cpu: whether the model runs on a CPU; None if only the engine knows, as with the device "auto" and a GPU that
    CUDA may not find.
    """
    by_option: dict[str, Mapping[str, Any]] = {}
    for option in ("model", "speculative_model"):
        if (given := getattr(config, option)) and (path := find_local(given, root)):
            if not is_model(path):
                raise no_model(option, given, path)
            with nullcontext() if option == "model" else draft_errors(config):
                by_option[option] = _check_model(config, path, on_cpu)
                _check_vocabularies([fields.get("vocab_size") for fields in by_option.values()])
    return by_option.get("model", {})


def _check_hub(config: EngineConfig, root: Path, on_cpu: bool | None) -> None:
    """Raise ConfigError for a name of a repository that cannot be fetched, or whose config.json is not supported."""
    revisions = {"model": config.revision, "speculative_model": None, "tokenizer": config.tokenizer_revision}
    for option, revision in revisions.items():
        name = getattr(config, option)
        if name and is_on_hub(name) and not find_local(name, root):
            path = hub.fetch(name, [CONFIG], revision, config.download_dir, option=option)
            if option == "model" and (path / CONFIG).exists():
                _check_config(config, path, model_files.read_object(path / CONFIG), on_cpu)


def is_on_hub(name: str) -> bool:
    """Return whether a name has the form of a repository on the hub: owner/model."""
    return HUB_NAME.fullmatch(name) is not None and not name.endswith(GGUF)


def _check_vocabularies(sizes: Sequence[Any]) -> None:
    """Raise ConfigError for a draft model with another vocabulary. sizes: the model's, then the draft model's."""
    if len(sizes) == 2 and all(isinstance(size, int) for size in sizes) and sizes[0] != sizes[1]:
        raise ConfigError(f"has {sizes[1]} tokens; must have the model's {sizes[0]}")


@contextmanager
def draft_errors(config: EngineConfig) -> Iterator[None]:
    """Make errors inside the context name the draft model."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"speculative_model={json.dumps(config.speculative_model)}: {error}") from error


def find_local(name: str, root: Path) -> Path | None:
    """Return the existing path of a model or tokenizer, or None."""
    paths = possible_paths(name, root)
    usable = (path for path in paths if is_model(path) or (path / FAST).is_file())
    return next(usable, next((path for path in paths if path.exists()), None))


def is_model(path: Path) -> bool:
    """Return whether a path is a directory with a model's configuration, or a GGUF file."""
    return (path / CONFIG).is_file() or (path.suffix == GGUF and path.is_file())


def no_model(option: str, value: str, path: Path) -> ConfigError:
    """Return the error of an option that names no model. path: the place that it names."""
    problem = f"no {CONFIG} in {path}" if path.exists() else f"{path} does not exist"
    return invalid_option(option, value, f"{problem}; give a Hugging Face model directory, or a {GGUF} file")


def read_template(given: str, root: Path) -> str:
    """Return the template in the option `chat_template`, or in the file that it names. Raises ConfigError."""
    if "{" in given:
        return given
    for path in possible_paths(given, root):
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise invalid_option("chat_template", given, f"cannot be read: {error}") from error
    raise invalid_option("chat_template", given, f"neither a template, which contains {{, nor a file in {root}")


def _runs_on_cpu(config: EngineConfig) -> bool:
    if config.device == "cuda" and not has_gpu():
        raise ConfigError('device="cuda": this machine has no GPU; use "auto" or "cpu"')
    return config.device == "cpu" or not has_gpu()


def _check_gpus(config: EngineConfig) -> None:
    """Raise ConfigError for more ranks or engines than GPUs. Without `nnodes`, the environment may name machines."""
    gpus = None if _runs_on_cpu(config) else gpu_limit()
    if gpus is not None and (config.nnodes is not None or "NNODES" not in os.environ):
        check_ranks(config, gpus)
        check_replicas(config, gpus)


def check_ranks(config: EngineConfig, gpus: int) -> None:
    """Raise ConfigError if there are more ranks on this machine than GPUs."""
    if config.num_ranks > 1 and config.ranks_per_node > gpus:
        nodes = config.nnodes or 1
        limit = f"{gpus}, the number of visible GPUs" if nodes == 1 else f"{nodes} x {gpus}, the visible GPUs"
        raise ConfigError(f"{ranks_named(config)} must be at most {limit}")


def ranks_named(config: EngineConfig) -> str:
    """Return the beginning of an error about the number of ranks."""
    sizes = f"tensor_parallel_size={config.tensor_parallel_size}"
    if config.pipeline_parallel_size == 1:
        return f"{sizes}:"
    return f"{sizes} * pipeline_parallel_size={config.pipeline_parallel_size}:"


def check_replicas(config: EngineConfig, gpus: int) -> None:
    """Raise ConfigError if the engines of data parallelism need more GPUs than there are."""
    needed = config.ranks_per_node * config.data_parallel_size
    if config.data_parallel_size > 1 and needed > gpus:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size}: needs {needed} GPUs, {config.ranks_per_node} for each"
            f" engine; {gpus} are visible"
        )


def _check_memory(config: EngineConfig) -> None:
    free = available_memory()
    if config.swap_space and config.swap_space * GIB > free:
        raise ConfigError(f"swap_space={config.swap_space:g}: must fit into the {free / GIB:.1f} GiB that are free")
    wanted = config.kv_cache_memory_bytes
    if wanted and not config.num_gpu_blocks_override and _runs_on_cpu(config) and wanted * config.ranks_per_node > free:
        raise ConfigError(
            f"kv_cache_memory_bytes={wanted}: a pool of {wanted / GIB:.1f} GiB; must fit into the"
            f" {free / GIB:.1f} GiB that are free"
        )


def check_host_pool(config: EngineConfig, *, on_cpu: bool) -> None:
    """Raise ConfigError for a store of the prefix cache without the host pool that it needs."""
    if config.swap_space == 0 or (config.swap_space is None and on_cpu):
        for name in STORES:
            if getattr(config, name):
                problem = "needs a host pool; set swap_space as well, or leave it out for a model with recurrent layers"
                raise invalid_option(name, getattr(config, name), problem)


def check_disk_cache(config: EngineConfig) -> None:
    """Raise ConfigError for a directory that cannot be written to, or has no room for `disk_cache_gib`.

    Creates it, for this user only.
    """
    assert config.disk_cache_dir
    directory = Path(config.disk_cache_dir).expanduser()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            file.write(bytes(4096))
            file.flush()
        used = sum(file.stat().st_size for file in directory.glob("*/*/*"))
        free = shutil.disk_usage(directory).free
    except OSError as error:
        problem = "is not a directory" if isinstance(error, FileExistsError) else f"cannot be written to: {error}"
        raise invalid_option("disk_cache_dir", config.disk_cache_dir, problem) from error
    if config.disk_cache_gib * GIB > free + used:
        raise ConfigError(
            f"disk_cache_gib={config.disk_cache_gib:g}: {directory} has room for {(free + used) / MIB:.1f} MiB; lower"
            " it, or name another disk_cache_dir"
        )


def remote_cache_problem(config: EngineConfig) -> str | None:
    """Return why the remote store cannot be reached now; None if it can, or there is none."""
    if config.remote_cache_url is None:
        return None
    address = RedisAddress.parse(config.remote_cache_url)
    try:
        socket.create_connection((address.host, address.port), config.remote_cache_timeout_ms / 1e3).close()
    except OSError as error:
        return f"remote_cache_url: {address}: {error.strerror or error}; it is tried again while the server runs"
    return None


def _check_model(config: EngineConfig, path: Path, on_cpu: bool | None) -> Mapping[str, Any]:
    """Return the fields of the text decoder; empty for a GGUF file. Raises ConfigError."""
    reads_weights = config.load_format != "dummy"
    if path.suffix == GGUF:
        if reads_weights and model_files.check_gguf(path).is_quantized and config.quantization:
            raise invalid_option("quantization", config.quantization, ALREADY_QUANTIZED)
        return {}
    model_files.check_text_files(path)
    fields = model_files.read_object(path / CONFIG)
    _check_config(config, path, fields, on_cpu)
    if reads_weights:
        quantized, like_llama = fields.get(QUANTIZATION) is not None, fields.get("model_type") in FULL_ATTENTION
        shapes = llama_shapes(fields) if like_llama and not quantized else None
        layers = fields.get("num_hidden_layers") if like_llama else None
        model_files.check_weights(path, quantized=quantized, shapes=shapes, layers=layers)
    return _text_fields(fields)


def _check_config(config: EngineConfig, path: Path, fields: Mapping[str, Any], on_cpu: bool | None) -> None:
    """Raise ConfigError for a config.json that is not supported, or not with these options."""
    _check_code(config, path, fields)
    _check_kind(path, fields)
    _check_quantization(path, fields, on_cpu)
    values = _text_fields(fields)
    check_values(path / CONFIG, values)
    check_division(config, values.get)
    check_layers(config, values.get("num_hidden_layers"))
    check_length(config.max_model_len, values.get("max_position_embeddings"), "the model's own limit")


def _text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the text decoder, which a multimodal model has in an object of its own."""
    text = fields.get("text_config")
    return text if isinstance(text, dict) else fields


def _check_code(config: EngineConfig, path: Path, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for a model that only code in its directory describes, unless it may run."""
    known = transformers_tables.config_classes()
    if "auto_map" in fields and known and fields.get("model_type") not in known and not config.trust_remote_code:
        shown = json.dumps(fields.get("model_type"))
        raise ConfigError(
            f"{path / CONFIG}: model_type={shown}: needs Python code of its own; set trust_remote_code if you trust it"
        )


def _check_kind(path: Path, fields: Mapping[str, Any]) -> None:
    reason = unsupported_fields(fields, has_modules=(path / MODULES).exists())
    if reason is not None:
        raise unsupported_model(path / CONFIG, fields.get("architectures"), fields.get("model_type"), reason)


def _check_quantization(path: Path, fields: Mapping[str, Any], on_cpu: bool | None) -> None:
    """Raise ConfigError for quantized weights that cannot be read, or not on the device. A model's own code may add
    methods that transformers does not have."""
    settings, methods = fields.get(QUANTIZATION), transformers_tables.quantization_methods()
    if settings is None:
        return
    if methods and "auto_map" not in fields:
        check_known(settings, path / CONFIG, methods)
    if isinstance(settings, dict) and on_cpu is not None:
        check_settings(settings, path / CONFIG, on_cpu=on_cpu)


def _check_pool(config: EngineConfig, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for a KV cache that is too small even with the smallest type that `dtype` may stand for, and
    without a draft model."""
    if config.chooses_block_size:  # the size with which the pool is large enough, if it is with any
        largest = config.num_gpu_blocks_override is not None
        size = INT4_BLOCK_SIZE if config.packs_blocks else AUTO_BLOCK_SIZES[-1 if largest else 0]
        config = replace(config, block_size=size)
    block, blocks = config.block_size * _token_bytes(config, fields), config.num_gpu_blocks_override
    if not block or (blocks is None and config.kv_cache_memory_bytes is None):
        return
    if blocks is not None and config.packs_blocks:  # most blocks of a long sequence take fewer pages than one of these
        return
    if blocks is None:
        blocks = (config.kv_cache_memory_bytes or 0) // block
    if not blocks:
        raise ConfigError(
            f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}: one block of {config.block_size} tokens takes at"
            f" least {block} bytes; give the pool more memory"
        )
    tokens = blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > tokens:
        raise ConfigError(
            f"max_model_len={config.max_model_len}: the KV cache holds at most {tokens} tokens ({blocks} blocks of"
            f" {config.block_size}); shorten it or give the pool more memory"
        )


def _token_bytes(config: EngineConfig, fields: Mapping[str, Any]) -> int:
    """Return the minimum bytes of a token in the KV cache of a rank; 0 if config.json alone does not tell."""
    if fields.get("model_type") not in FULL_ATTENTION or fields.get("use_sliding_window"):
        return 0
    layers, heads, size = (fields.get(name) for name in ("num_hidden_layers", HEADS[0], "head_dim"))
    kv_heads = fields.get(HEADS[1], heads)
    if size is None and all(isinstance(value, int) and value for value in (heads, fields.get("hidden_size"))):
        size = fields["hidden_size"] // heads
    if not (isinstance(layers, int) and isinstance(kv_heads, int) and isinstance(size, int)):
        return 0
    itemsize, scale = (4 if DTYPES[config.dtype] == "float32" else 2), 0
    vectors = 2 * (layers // config.pipeline_parallel_size) * (kv_heads // config.tensor_parallel_size)
    if config.packs_blocks:
        return vectors * size * 9 // 16  # four bits and half a bit of scales
    if KV_CACHE_DTYPES[config.kv_cache_dtype] != "auto":
        itemsize, scale = 1, 4  # each head of a token has a float32 scale
    return vectors * (size * itemsize + scale)


def check_length(requested: int | None, limit: Any, reason: str) -> None:
    """Raise ConfigError if the context length exceeds the model's. limit: ignored unless it is an integer."""
    if requested is not None and isinstance(limit, int) and requested > limit:
        raise ConfigError(f"max_model_len={requested}: must be at most {limit}, {reason}")


def check_division(config: EngineConfig, value_of: Callable[[str], Any]) -> None:
    """Raise ConfigError if heads cannot be divided over `tensor_parallel_size` ranks. value_of: returns a field of the
    model's configuration, or None."""
    size = config.tensor_parallel_size
    for name in HEADS:
        heads = value_of(name) or value_of(HEADS[0])
        if isinstance(heads, int) and heads % size:
            raise ConfigError(f"tensor_parallel_size={size}: must divide {heads}, the model's {name}")


def check_layers(config: EngineConfig, layers: Any) -> None:
    """Raise ConfigError if there are more pipeline stages than layers. layers: ignored unless it is an integer."""
    if isinstance(layers, int) and layers < config.pipeline_parallel_size:
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size}: must be at most {layers}, the model's"
            " num_hidden_layers"
        )
