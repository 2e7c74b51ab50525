"""`paged install-backend`: makes the engine a backend of Triton's, which a config.pbtxt names, needing little else."""

import os
import re
import shutil
from pathlib import Path

from client.serving.server_files import REPOSITORY_ROOT, ServerNotFoundError, find_server

NAMES = ("paged", "vllm")
_MARK = "Written by `paged install-backend`"
_TEXT = '''"""{mark}: serves the models whose config.pbtxt says `backend: "{name}"`."""

import sys

sys.path.insert({position}, {root!r})

from paged_backend.server.triton_model import TritonPythonModel  # noqa: E402, F401
'''


def install(directory: Path, name: str = NAMES[0]) -> list[Path]:
    """Make `directory` a tritonserver's backend directory with a backend `name` in it; what was written.

    A server's own directory has Triton's Python backend, which this one needs. Into one that lacks it the one of the
    server in the wheel is copied, where that is the server at hand. Writing again renews what was written.

    Raises ValueError for a name that Triton would not take or that is another backend's, ServerNotFoundError where
    there is no Python backend to copy, OSError.
    """
    if not re.fullmatch(r"[A-Za-z0-9_]+", name) or name == "python":
        raise ValueError(f"name={name!r}: must be letters, digits and underscores, and not python")
    file = directory / name / "model.py"
    others = [file] if file.exists() and _MARK not in file.read_text(errors="replace") else []
    if others := [*others, *(directory / name).glob("*.so")]:
        raise ValueError(f"{others[0]}: is another backend's; move {directory / name} away first")
    written = [] if (directory / "python").is_dir() else [_copy_python_backend(directory)]
    file.parent.mkdir(parents=True, exist_ok=True)
    _replace(file, _text(name))
    return [*written, file]


def _text(name: str) -> str:
    """A checkout goes before what is installed; an installed package's directory after all else, for in it are others'
    packages too."""
    position = "0" if (REPOSITORY_ROOT / "pyproject.toml").is_file() else "len(sys.path)"
    return _TEXT.format(mark=_MARK, name=name, position=position, root=str(REPOSITORY_ROOT))


def _replace(file: Path, text: str) -> None:
    """At one stroke: a server may be reading it."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(file)


def _copy_python_backend(directory: Path) -> Path:
    source = find_server().backend_directory
    if source is None:
        raise ServerNotFoundError(f"{directory}: has no Python backend; give the server's own backend directory")
    return Path(shutil.copytree(source / "python", directory / "python"))
