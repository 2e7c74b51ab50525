"""What can be checked of a start from the options, the memory, directories and the headers of files.

Needs no torch, whose import takes seconds: `paged serve` checks this before it starts a server, and the engine before
it imports torch. What needs the model's layers is checked by the engine, also before weights are read.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.options import invalid_option
from paged_backend.api.redis_address import RedisAddress
from paged_backend.api.sizes import GIB, MIB
from paged_backend.files import model_files
from paged_backend.files.model_files import CONFIG, GGUF, QUANTIZATION
from paged_backend.utils.machine import available_memory, has_gpu

ROOT = Path(__file__).resolve().parents[2]  # the repository, or the directory in which the package is installed
TIERS = ("disk_cache_dir", "remote_cache_url")
HEADS = ("num_attention_heads", "num_key_value_heads")
TOKENIZER = "tokenizer.json"
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "spm*")  # files that a tokenizer may have


def check_start(config: EngineConfig, root: Path = ROOT) -> None:
    """Raise ConfigError for a start that cannot succeed. root: where relative paths of options begin."""
    _check_memory(config)
    check_host_pool(config, on_cpu=_runs_on_cpu(config))
    if config.disk_cache_dir is not None:
        check_disk_cache(config)
    if config.chat_template is not None:
        find_template(config.chat_template, root)
    for name in ("model", "speculative_model", "tokenizer"):
        if (given := getattr(config, name)) and (path := find_local(given, root)):
            _check_tokenizer(config, path) if name == "tokenizer" else _check_model(config, path, name)


def possible_paths(name: str, root: Path) -> list[Path]:
    """Return where a path in the options may be: relative to `root`, or to the working directory."""
    return [base / Path(name).expanduser() for base in (root, Path.cwd())]


def find_local(name: str, root: Path) -> Path | None:
    """Return the existing path of a model or tokenizer; None without one."""
    paths = possible_paths(name, root)
    usable = (path for path in paths if is_model(path) or (path / TOKENIZER).is_file())
    return next(usable, next((path for path in paths if path.exists()), None))


def is_model(path: Path) -> bool:
    """Return whether a path is a directory with a model's configuration, or a GGUF file."""
    return (path / CONFIG).is_file() or (path.suffix == GGUF and path.is_file())


def no_model(option: str, value: str, path: Path) -> ConfigError:
    """Return the error of an option that names no model. path: the place that it names."""
    problem = f"no {CONFIG} in {path}" if path.exists() else f"{path} does not exist"
    return invalid_option(option, value, f"{problem}; give a Hugging Face model directory, or a {GGUF} file")


def find_template(given: str, root: Path) -> Path | None:
    """Return the file of the option `chat_template`; None if it is a template itself. Raises ConfigError."""
    if "{" in given:
        return None
    for path in possible_paths(given, root):
        if path.is_file():
            return path
    raise invalid_option("chat_template", given, f"neither a template, which contains {{, nor a file in {root}")


def _runs_on_cpu(config: EngineConfig) -> bool:
    if config.device == "cuda" and not has_gpu():
        raise ConfigError('device="cuda": this machine has no GPU; use "auto" or "cpu"')
    return config.device == "cpu" or not has_gpu()


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
    """Raise ConfigError for a tier of the prefix cache without the host pool that it needs."""
    if config.swap_space == 0 or (config.swap_space is None and on_cpu):
        for name in TIERS:
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
        raise invalid_option("disk_cache_dir", config.disk_cache_dir, f"cannot be written to: {error}") from error
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


def _check_model(config: EngineConfig, path: Path, option: str) -> None:
    reads_weights = config.load_format != "dummy"
    if not is_model(path):
        raise no_model(option, getattr(config, option), path)
    if path.suffix == GGUF:
        if reads_weights:
            model_files.check_gguf(path)
        return
    model_files.check_text_files(path)
    fields = model_files.read_object(path / CONFIG)
    if option == "model":
        text = fields.get("text_config")
        values = text if isinstance(text, dict) else fields
        check_division(config, values.get)
        check_length(config.max_model_len, values.get("max_position_embeddings"), "the model's own limit")
        if not config.tokenizer:
            _check_tokenizer(config, path)
    if reads_weights:
        model_files.check_weights(path, quantized=fields.get(QUANTIZATION) is not None)


def _check_tokenizer(config: EngineConfig, path: Path) -> None:
    if path.suffix == GGUF or config.trust_remote_code:
        return
    if not any(next(path.glob(pattern), None) for pattern in TOKENIZERS):
        raise ConfigError(f"tokenizer: no tokenizer in {path}: neither tokenizer.json nor a vocabulary exists")


def check_length(requested: int | None, limit: Any, reason: str) -> None:
    """Raise ConfigError if the context length exceeds the model's. limit: not an integer if there is none."""
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
