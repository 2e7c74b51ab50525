"""Installs the engine as a Triton backend, which a config.pbtxt selects with `backend: "paged"`."""

import os
import re
import shutil
from pathlib import Path

from paged_client.serving.server_files import REPOSITORY_ROOT, ServerNotFoundError, find_server

NAMES = ("paged", "vllm")
_MARK = "Written by `paged install-backend`"
_TEXT = '''"""{mark}: serves the models whose config.pbtxt says `backend: "{name}"`."""

import sys

sys.path[{position}:{position}] = {paths!r}

from paged_backend.server.triton_model import TritonPythonModel  # noqa: E402, F401
'''


def install(directory: Path, name: str = NAMES[0]) -> list[Path]:
    """Install the backend `name` in a backend directory of a tritonserver, and return the files written.

    The engine needs Triton's Python backend. If the directory does not have it, it is copied from the server in the
    nvidia-pytriton wheel. Installing again replaces the files.

    Raises ValueError for a name that is not valid or belongs to another backend, ServerNotFoundError if there is no
    Python backend to copy, OSError.
    """
    if not re.fullmatch(r"[A-Za-z0-9_]+", name) or name == "python":
        raise ValueError(f"name={name!r}: must be letters, digits and underscores, and not python")
    file = directory / name / "model.py"
    others = [file] if file.exists() and _MARK not in file.read_text(errors="replace") else []
    if others := [*others, *(directory / name).glob("*.so")]:
        raise ValueError(f"{others[0]}: belongs to another backend; move {directory / name} away first")
    written = [] if (directory / "python").is_dir() else [_copy_python_backend(directory)]
    file.parent.mkdir(parents=True, exist_ok=True)
    _replace(file, _text(name))
    return [*written, file]


def _text(name: str) -> str:
    """Return the source of the backend's model.py.

    A checkout goes to the front of sys.path. An installed package's directory goes to the end, because it also has
    other packages.
    """
    is_checkout = (REPOSITORY_ROOT / "pyproject.toml").is_file()
    position = "0" if is_checkout else "len(sys.path)"
    paths = [str(REPOSITORY_ROOT), *([str(REPOSITORY_ROOT / "kernels")] if is_checkout else [])]
    return _TEXT.format(mark=_MARK, name=name, position=position, paths=paths)


def _replace(file: Path, text: str) -> None:
    """Replace a file atomically: a server may be reading it."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(file)


def _copy_python_backend(directory: Path) -> Path:
    source = find_server().backend_directory
    if source is None:
        raise ServerNotFoundError(f"{directory}: has no Python backend; use the server's own backend directory")
    return Path(shutil.copytree(source / "python", directory / "python"))
