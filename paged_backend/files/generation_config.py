"""Defaults of sampling parameters from a model's `generation_config.json`.

The keys are those that vLLM reads. `max_new_tokens` is the default of `max_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_backend.api.errors import ConfigError
from paged_backend.api.limits import SamplingDefaults
from paged_backend.api.sampling_params import DEFAULT_KEYS, SAMPLING_KEYS, parse_default, to_defaults
from paged_backend.files import model_files
from paged_backend.files.model_files import possible_paths
from paged_backend.utils.startup import startup_log

AUTO, BUILT_IN = "auto", "vllm"  # values of the option `generation_config` that are not directories


def read_sampling_defaults(
    option: str, overrides: Mapping[str, Any] | None, root: Path, model_path: Path
) -> SamplingDefaults:
    """Return the defaults that the options and the model's files set, and log them.

    Args:
        option: the engine option `generation_config`.
        overrides: the engine option `override_generation_config`.
        root: where a relative path in `option` is looked up first.
        model_path: the model's directory or GGUF file.

    Raises ConfigError for a file that is missing, or has an invalid value.
    """
    file, overrides = _find_file(option, root, model_path), overrides or {}
    values: dict[str, Any] = {} if file is None else _read_file(file)
    sources = [file.name if option == AUTO else str(file)] if file and values else []
    sources += ["override_generation_config"] if overrides else []
    defaults = to_defaults({**values, **overrides})
    if defaults.values:
        shown = {
            name: defaults.max_tokens if name == "max_tokens" else value for name, value in defaults.values.items()
        }
        listed = ", ".join(f"{name}={json.dumps(value)}" for name, value in shown.items())
        startup_log.info("default sampling parameters from %s: %s", " and ".join(sources), listed)
    return defaults


def check_defaults(option: str, root: Path, model_path: Path) -> None:
    """Raise ConfigError where `read_sampling_defaults` does."""
    if file := _find_file(option, root, model_path):
        _read_keys(file)


def _find_file(option: str, root: Path, model_path: Path) -> Path | None:
    """Return the file to read, or None for the engine's own defaults."""
    if option == BUILT_IN:
        return None
    if option == AUTO:
        file = model_path / model_files.GENERATION  # does not exist if the model is a GGUF file
        return file if file.is_file() else None
    candidates = [path / model_files.GENERATION for path in possible_paths(option, root)]
    for file in candidates:
        if file.is_file():
            model_files.check_text_files(file.parent)
            return file
    raise ConfigError(
        f"generation_config={json.dumps(option)}: no {model_files.GENERATION} in {candidates[0].parent}; give"
        f' "{AUTO}", "{BUILT_IN}" or a directory with this file'
    )


def _read_file(file: Path) -> dict[str, Any]:
    """Return the values that set a default. With `do_sample: false`, sampling parameters set none, as in transformers,
    where they have no effect then."""
    values, do_sample = _read_keys(file)
    unused = [key for key in SAMPLING_KEYS if key in values] if do_sample is False else []
    if unused:
        startup_log.info("%s has do_sample=false: its %s is not used", file.name, ", ".join(unused))
    return {key: value for key, value in values.items() if key not in unused}


def _read_keys(file: Path) -> tuple[dict[str, Any], Any]:
    """Return the values of DEFAULT_KEYS, and the value of `do_sample`. Raises ConfigError."""
    stored = model_files.read_object(file)
    values = {key: stored[key] for key in DEFAULT_KEYS if stored.get(key) is not None}
    for key, value in values.items():
        try:
            parse_default(key, value)
        except ValueError as error:
            hint = f'; correct it, or set generation_config to "{BUILT_IN}"'
            raise ConfigError(f"{file}: {key}={json.dumps(value)}: {error}{hint}") from None
    return values, stored.get("do_sample")
