"""The model repository of a server: its engine options and its files."""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from paged_backend.api.config import HUB_NAME, EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.limits import merge_options
from paged_backend.api.secrets import redacted
from paged_backend.files import start_checks
from paged_client.serving import demo_model
from paged_client.serving.server_files import MODEL_REPOSITORY, cache_directory, create_atomically

MODELS = ("model", "speculative_model")  # options that name a model
MODEL_NAME = "paged_llm"  # name of the engine's model in the project's model repository
_VALID_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def resolve_models(options: Mapping[str, object]) -> dict[str, object]:
    """Return engine options with `resolve_model` applied to the options that name a model."""
    models = {name: options.get(name) for name in MODELS}
    resolved = {name: resolve_model(value, name) for name, value in models.items() if isinstance(value, str | Path)}
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


def write_repository(
    source: Path,
    target: Path,
    options: Mapping[str, object],
    multi_lora: Path | None = None,
    *,
    engine_only: bool = False,
) -> None:
    """Copy the model repository `source` to `target`.

    Args:
        options: engine options, which override those in model.json. `served_model_name` renames the engine's model in
            the copy.
        multi_lora: file that lists LoRA adapters. The copy gets a link to it or, without one, to the list in `source`.
        engine_only: copy only the engine's model.

    Raises ValueError if `source` has no such model, or another model that has the served name.
    """
    if not (source / MODEL_NAME).is_dir():
        raise ValueError(f"model repository {source}: has no {MODEL_NAME}/")
    copied = Path(MODEL_NAME if engine_only else ".")
    shutil.copytree(source / copied, target / copied, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    name = served_name(options)
    if name != MODEL_NAME:
        _rename_model(target, name)
    settings = target / name / "1" / "model.json"
    text = json.dumps(merge_options(json.loads(settings.read_text()), options), indent=2)
    if redacted(text) != text:
        settings.chmod(0o600)
    settings.write_text(text)
    listing = settings.with_name("multi_lora.json")
    listing.unlink(missing_ok=True)
    listing.symlink_to((multi_lora or source / MODEL_NAME / "1" / listing.name).absolute())


def make_repository(
    options: Mapping[str, object], multi_lora: Path | None = None, directory: Path | None = None
) -> Path:
    """Write a copy of the project's model repository that tritonserver can serve, and return its directory.

    Args:
        options, multi_lora: as for `write_repository`. Models are resolved. A list of adapters sets `enable_lora`.
        directory: must be missing or empty. The default is a directory in the cache that depends on the contents, and
            that is written only once.

    Raises ValueError for a model that does not exist or a directory that is not empty, DemoModelError, OSError.
    """
    options = resolve_models({**({"enable_lora": True} if multi_lora else {}), **options})
    if directory is None:
        digest = hashlib.sha256(repr((sorted(options.items()), multi_lora and multi_lora.absolute())).encode())
        for file in sorted(MODEL_REPOSITORY.rglob("*.*")):
            if file.suffix != ".pyc":
                digest.update(str(file.relative_to(MODEL_REPOSITORY)).encode() + file.read_bytes())
        directory = cache_directory() / "model_repositories" / digest.hexdigest()[:16]
        if directory.exists():
            return directory
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # options may have secrets
    elif directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory}: is not empty")

    def make(made: Path) -> None:
        write_repository(MODEL_REPOSITORY, made, options, multi_lora)
        listing = made / served_name(options) / "1" / "multi_lora.json"
        if not listing.exists():
            listing.unlink()  # a link to a list that the package does not have

    create_atomically(directory.absolute(), make)
    return directory.absolute()


def served_name(options: Mapping[str, object]) -> str:
    """Return the name of the engine's model for these options. Raises ConfigError if Triton could not use it."""
    name = options.get("served_model_name") or MODEL_NAME
    if not isinstance(name, str) or not _VALID_NAME.fullmatch(name):
        raise ConfigError(
            f"served_model_name={name!r}: must be letters, digits, '.', '_' and '-', because it is the name of a"
            " directory"
        )
    return name


def _rename_model(repository: Path, name: str) -> None:
    """Rename the engine's model in a model repository, and in the configuration of models that forward to it."""
    if (repository / name).exists():
        raise ConfigError(f"served_model_name={name!r}: the model repository has another model of this name")
    (repository / MODEL_NAME).rename(repository / name)
    for file in repository.glob("*/config.pbtxt"):
        file.write_text(file.read_text().replace(f'"{MODEL_NAME}"', f'"{name}"'))


def check_options(options: Mapping[str, object]) -> None:
    """Raises ConfigError for an engine option that is unknown or out of range, given the project's model.json."""
    _engine_config(options)


def _check_files(options: Mapping[str, object]) -> None:
    """Raise ConfigError for an option that should name a model, but names neither files nor a possible model on the
    hub."""
    for name in MODELS:
        given = options.get(name)
        if isinstance(given, str) and given != "demo":
            path = Path(resolve_model(given, name))
            if path.is_dir() and not start_checks.is_model(path):
                raise start_checks.no_model(name, given, path)


def check_model(options: Mapping[str, object]) -> None:
    """Raise ConfigError for options with which the server could not start on this machine, as far as can be seen
    without loading the model. The demo model is checked if it is there."""
    _check_files(options)
    start_checks.check_start(_engine_config(_with_demo(options)))


def check_plan(options: Mapping[str, object], *, on_cpu: bool) -> None:
    """Raise ConfigError for options with which no machine could serve the model, as `check_model` does. on_cpu: whether
    the plan is for a CPU."""
    _check_files(options)
    start_checks.check_models(_engine_config(_with_demo(options)), on_cpu=on_cpu)


def _with_demo(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options with the directory of the demo model, which may be missing."""
    known = {name: str(demo_model.default_directory()) for name in MODELS if options.get(name) == "demo"}
    return {**options, **known}


def _engine_config(options: Mapping[str, object]) -> EngineConfig:
    settings = MODEL_REPOSITORY / MODEL_NAME / "1" / "model.json"
    served_name(options)
    return EngineConfig.from_options(merge_options(json.loads(settings.read_text()), options))
