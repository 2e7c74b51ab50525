"""The model repository of a server: its engine options and its files."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from client.serving import demo_model
from client.serving.server_files import REPOSITORY_ROOT
from paged_backend.api.config import HUB_NAME, EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.option_parsing import merge_options

MODEL_NAME = "paged_llm"


def resolve_models(options: Mapping[str, object]) -> dict[str, object]:
    """Return engine options with `resolve_model` applied to the options that name a model."""
    models = {name: options.get(name) for name in ("model", "speculative_model")}
    resolved = {name: resolve_model(one, name) for name, one in models.items() if isinstance(one, str | Path)}
    return {**options, **resolved}


def resolve_model(model: str | Path, option: str = "model") -> str:
    """Return the value of an engine option that names a model: an absolute path or a name on the hub.

    "demo" is the demo model, which is downloaded if it is missing. Raises ConfigError for files that do not exist.
    """
    if model == "demo":
        return str(demo_model.prepare())
    if Path(model).is_dir() or (Path(model).suffix == ".gguf" and Path(model).is_file()):
        return str(Path(model).absolute())
    if isinstance(model, str) and HUB_NAME.fullmatch(model):
        return model
    raise ConfigError(
        f"{option}={str(model)!r}: must be 'demo', a directory or .gguf file that exists, or a name on the hub"
        " (owner/model)"
    )


def write_repository(source: Path, target: Path, options: Mapping[str, object], multi_lora: Path | None = None) -> None:
    """Copy the model repository `source` to `target`.

    Args:
        options: engine options, which override those in model.json.
        multi_lora: file that lists LoRA adapters. The copy gets a link to it or, without one, to the list in `source`,
            which may be created later.
    """
    if not (source / MODEL_NAME).is_dir():
        raise ValueError(f"model repository {source}: has no {MODEL_NAME}/ (run from a checkout)")
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    settings = target / MODEL_NAME / "1" / "model.json"
    settings.write_text(json.dumps(merge_options(json.loads(settings.read_text()), options), indent=2))
    listing = settings.with_name("multi_lora.json")
    listing.unlink(missing_ok=True)
    listing.symlink_to((multi_lora or source / MODEL_NAME / "1" / listing.name).absolute())


def check_options(options: Mapping[str, object]) -> None:
    """Raises ConfigError for an engine option that is unknown or out of range, given the project's model.json.

    Raises FileNotFoundError if that file is missing, as in an installed package.
    """
    settings = REPOSITORY_ROOT / "model_repository" / MODEL_NAME / "1" / "model.json"
    if not settings.is_file():
        raise FileNotFoundError(
            f"{settings}: not found; `paged serve` needs a checkout of the repository. An installed package"
            " serves through `paged install-backend`"
        )
    EngineConfig.from_options(merge_options(json.loads(settings.read_text()), options))
