"""Finds tritonserver, its Python backend and the shared libraries that they and perf_analyzer need.

An installed server (an NGC container's) is used as it is. Otherwise the one inside the nvidia-pytriton
wheel is: it needs a backend directory put together for the running interpreter, and its libraries named.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBPYTHON = f"libpython{PYTHON}.so.1.0"


class ServerNotFoundError(RuntimeError):
    """No tritonserver that could run, or a part of it is missing; the message says what to install."""


@dataclass(frozen=True)
class ServerFiles:
    """What it takes to start a tritonserver."""

    binary: Path
    backend_directory: Path | None = None  # None: the server's own
    library_path: tuple[Path, ...] = ()  # goes in front of LD_LIBRARY_PATH


def cache_directory() -> Path:
    """Where prepared files are kept: $PAGED_CACHE_DIR, or .cache in the repository."""
    return Path(os.environ.get("PAGED_CACHE_DIR") or REPOSITORY_ROOT / ".cache").absolute()


def find_server() -> ServerFiles:
    """The installed tritonserver if there is one, else the wheel's.

    Raises ServerNotFoundError where there is neither, or no libpython for the wheel's Python stub.
    """
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/opt/tritonserver/bin"])
    installed = shutil.which("tritonserver", path=search)
    if installed:
        return ServerFiles(Path(installed))
    wheel = _wheel()
    if wheel is None:
        raise ServerNotFoundError(
            "no tritonserver: not on PATH, not in /opt/tritonserver/bin, and nvidia-pytriton is not installed"
            " (pip install 'paged-llm-triton[server]')"
        )
    backends = _backend_directory(wheel)
    libraries = [wheel.parent / "nvidia_pytriton.libs", *_libpython_directory()]
    return ServerFiles(wheel / "tritonserver/bin/tritonserver", backends, tuple(libraries))


def perf_analyzer() -> tuple[Path, dict[str, str]] | None:
    """perf_analyzer's path and the environment it runs in, or None where it cannot run.

    tritonclient's binary asks for libb64.so.0d and libcudart.so.12, which few machines have. The server's
    wheel carries both under names of its own, so links with the wanted names are enough.
    """
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    binary = shutil.which("perf_analyzer", path=search)
    if binary is None:
        return None
    environment = dict(os.environ)
    if wheel := _wheel():
        prepend(environment, "LD_LIBRARY_PATH", [_perf_analyzer_libraries(wheel)])
    runs = subprocess.run([binary, "--version"], env=environment, capture_output=True, check=False)
    return (Path(binary), environment) if runs.returncode == 0 else None


def prepend(environment: dict[str, str], name: str, directories: list[Path]) -> None:
    """Put directories in front of a search path variable, in place."""
    parts = [str(directory) for directory in directories]
    if environment.get(name):
        parts.append(environment[name])
    environment[name] = os.pathsep.join(parts)


def _wheel() -> Path | None:
    """The package directory of nvidia-pytriton. It is not imported: that would pull in all of PyTriton."""
    spec = util.find_spec("pytriton")
    return Path(spec.origin).parent if spec and spec.origin else None


def _version() -> str:
    return metadata.version("nvidia-pytriton")


def _backend_directory(wheel: Path) -> Path:
    """A backend directory with the stub of this interpreter.

    Real copies: the server refuses links that lead out of the backend directory.
    """
    backends = cache_directory() / f"tritonserver-{_version()}-python{PYTHON}"
    stub = wheel / "tritonserver/python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    if not stub.exists():
        raise ServerNotFoundError(f"nvidia-pytriton {_version()} has no Python {PYTHON} stub: no {stub}")
    source = wheel / "tritonserver/backends/python"
    if not backends.exists():
        files = [stub, *(file for file in source.iterdir() if file.is_file())]
        _fill(backends, {f"python/{file.name}": file for file in files}, shutil.copy2)
    return backends


def _perf_analyzer_libraries(wheel: Path) -> Path:
    libraries = wheel.parent / "nvidia_pytriton.libs"
    wanted = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
    links = {name: next(libraries.glob(pattern), None) for name, pattern in wanted.items()}
    # The links name files inside the virtual environment, so each environment has its own.
    directory = Path(sys.prefix) / "lib" / f"perf_analyzer-{_version()}"
    if not directory.exists():
        _fill(directory, {name: file for name, file in links.items() if file}, _link)
    return directory


def _link(source: Path, target: Path) -> None:
    target.symlink_to(source)


def _fill(directory: Path, files: dict[str, Path], place: Callable[[Path, Path], object]) -> None:
    """Make `directory` with `files` (path inside it -> source) at one stroke, whoever else does the same."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        for name, source in files.items():
            target = Path(scratch, "new", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            place(source, target)
        try:
            Path(scratch, "new").rename(directory)
        except OSError:
            if not directory.exists():
                raise


def _libpython_directory() -> list[Path]:
    """Where the stub finds libpython: empty where the loader finds it by itself.

    Distributions link python3 statically and put the library in a package of its own. Where that is not
    installed it is fetched without root, on the systems that have apt-get.
    """
    for place in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix, "lib"), *_fetched_directories()):
        if place and Path(place, LIBPYTHON).exists():
            return [Path(place)]
    if _loads(LIBPYTHON):
        return []
    _fetch_debian_package(f"libpython{PYTHON}")
    for place in _fetched_directories():
        if Path(place, LIBPYTHON).exists():
            return [place]
    raise ServerNotFoundError(
        f"the server's Python stub needs {LIBPYTHON}: {sys.executable} has none, and none is installed"
        f" (Debian and Ubuntu: apt install libpython{PYTHON})"
    )


def _loads(library: str) -> bool:
    """Whether the loader finds a library. Asked in a process of its own: loading cannot be undone."""
    code = f"import ctypes; ctypes.CDLL({library!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def _fetched() -> Path:
    return cache_directory() / "debian"


def _fetched_directories() -> list[Path]:
    return [file.parent for file in _fetched().glob(f"usr/lib/*/{LIBPYTHON}")]


def _fetch_debian_package(name: str) -> None:
    """Download a Debian package and unpack it below the cache, without root. Does nothing elsewhere."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        return
    with tempfile.TemporaryDirectory() as scratch:
        print(f"Fetching {name}, which the server needs and this machine lacks", flush=True)
        download = ["apt-get", "-qq", "download", name]
        if subprocess.run(download, cwd=scratch, check=False).returncode and os.geteuid() == 0:
            # A fresh machine's package lists are empty; only root may fill them.
            subprocess.run(["apt-get", "-qq", "update"], check=False)
            subprocess.run(download, cwd=scratch, check=False)
        for package in Path(scratch).glob("*.deb"):
            _fetched().mkdir(parents=True, exist_ok=True)
            subprocess.run(["dpkg", "-x", package, _fetched()], check=True)


def main() -> int:
    """Prepare everything, and say what will be used."""
    try:
        files = find_server()
    except ServerNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"tritonserver: {files.binary}")
    found = perf_analyzer()
    print(f"perf_analyzer: {found[0] if found else 'cannot run here: it needs glibc 2.34 and tritonclient'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
