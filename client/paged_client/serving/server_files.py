"""Finds tritonserver, its Python backend, and the shared libraries that they and perf_analyzer need.

An installed server, as in an NGC container, is used as it is. Otherwise the server inside the nvidia-pytriton wheel is
used, which needs a backend directory for the running Python interpreter and a library path. `paged serve`,
`paged tritonserver` and this package's own `tritonserver` script start the server that is found here.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from paged_backend.utils.machine import user_cache_directory

_PACKAGE = Path(__file__).resolve().parents[1]
_IS_CHECKOUT = (_PACKAGE.parents[1] / "pyproject.toml").is_file()
# A checkout has the package in client/. An installed package is in a directory with other packages.
REPOSITORY_ROOT = _PACKAGE.parents[1] if _IS_CHECKOUT else _PACKAGE.parent
MODEL_REPOSITORY = (_PACKAGE / "model_repository").resolve()  # a link to the folder at the root of a checkout
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_BACKEND_DIRECTORY = "--backend-directory"
LIBPYTHON = f"libpython{PYTHON}.so.1.0"


class ServerNotFoundError(RuntimeError):
    """There is no usable tritonserver, or a part of it is missing. The message says what to install."""


@dataclass(frozen=True)
class ServerFiles:
    """The files of a tritonserver."""

    binary: Path
    backend_directory: Path | None = None  # None is the server's default
    library_path: tuple[Path, ...] = ()  # directories to prepend to LD_LIBRARY_PATH

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line of the server. A backend directory in `arguments` replaces the server's."""
        own = self.backend_directory and not any(argument.startswith(_BACKEND_DIRECTORY) for argument in arguments)
        return [str(self.binary), *([f"{_BACKEND_DIRECTORY}={self.backend_directory}"] if own else []), *arguments]


def cache_directory() -> Path:
    """Return the directory for generated files.

    It is $PAGED_CACHE_DIR, or .cache in a checkout. An installed package uses `user_cache_directory`.
    """
    if _IS_CHECKOUT and not os.environ.get("PAGED_CACHE_DIR"):
        return REPOSITORY_ROOT / ".cache"
    return user_cache_directory()


def create_atomically(path: Path, make: Callable[[Path], object]) -> None:
    """Create a file or directory that is complete as soon as it exists, even if other processes do the same.

    make: creates it at the path that it gets, in a temporary directory that it may use for other files too.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same directory as the target, so that the last step is a rename within one file system.
        created = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        own = "; PAGED_CACHE_DIR names another directory" if path.is_relative_to(cache_directory()) else ""
        raise OSError(f"{path.parent}: cannot be written to: {error.strerror}{own}") from error
    with created as scratch:
        made = Path(scratch, "new")
        make(made)
        try:
            made.rename(path)
        except OSError:
            if not path.exists():
                raise


def find_server() -> ServerFiles:
    """Return the installed tritonserver if there is one, else the one in the wheel.

    Raises ServerNotFoundError if there is neither, or no libpython for the Python stub of the wheel.
    """
    search = [*os.environ.get("PATH", os.defpath).split(os.pathsep), "/opt/tritonserver/bin"]
    candidates = (shutil.which("tritonserver", path=directory) for directory in search if directory)
    installed = next((Path(path) for path in candidates if path and not _is_own_script(Path(path))), None)
    if installed:
        return ServerFiles(installed)
    wheel = _wheel()
    if wheel is None:
        raise ServerNotFoundError(
            "no tritonserver: not on PATH, not in /opt/tritonserver/bin, and nvidia-pytriton is not installed"
            " (pip install 'paged-llm-triton[server]')"
        )
    backends = _backend_directory(wheel)
    libraries = [wheel.parent / "nvidia_pytriton.libs", *_libpython_directory()]
    return ServerFiles(wheel / "tritonserver/bin/tritonserver", backends, tuple(libraries))


def _is_own_script(file: Path) -> bool:
    """Return whether a program is the `tritonserver` script that the installation of this package writes."""
    with file.open("rb") as program:
        return _PACKAGE.name.encode() in program.read(1024)


def perf_analyzer() -> tuple[Path, dict[str, str]] | None:
    """Return the path of perf_analyzer and the environment to run it in, or None if it cannot run.

    The binary in tritonclient needs libb64.so.0d and libcudart.so.12, which few machines have. The nvidia-pytriton
    wheel has both under other names, so links with the expected names are enough.
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
    """Prepend directories to a search path variable of `environment`, in place."""
    parts = [str(directory) for directory in directories]
    if environment.get(name):
        parts.append(environment[name])
    environment[name] = os.pathsep.join(parts)


def _wheel() -> Path | None:
    """Return the package directory of nvidia-pytriton, without importing the package."""
    spec = util.find_spec("pytriton")
    return Path(spec.origin).parent if spec and spec.origin else None


def _version() -> str:
    return metadata.version("nvidia-pytriton")


def _backend_directory(wheel: Path) -> Path:
    """Return a backend directory with the Python stub for this interpreter.

    Its files are copies, because the server rejects links that point outside of the backend directory.
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
    patterns = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
    links = {name: next(libraries.glob(pattern), None) for name, pattern in patterns.items()}
    # The links point into the virtual environment, so each environment has its own.
    directory = Path(sys.prefix) / "lib" / f"perf_analyzer-{_version()}"
    if not directory.exists():
        _fill(directory, {name: file for name, file in links.items() if file}, _link)
    return directory


def _link(source: Path, target: Path) -> None:
    target.symlink_to(source)


def _fill(directory: Path, files: dict[str, Path], place: Callable[[Path, Path], object]) -> None:
    """Create `directory` as `create_atomically` does.

    Args:
        files: source by path inside of the directory.
        place: copies or links a source to a target.
    """

    def make(made: Path) -> None:
        for name, source in files.items():
            target = made / name
            target.parent.mkdir(parents=True, exist_ok=True)
            place(source, target)

    create_atomically(directory, make)


def _libpython_directory() -> list[Path]:
    """Return the directory of libpython for the stub; an empty list if the loader finds it already.

    Debian and Ubuntu link python3 statically and have the library in another package. If that is not installed, it is
    downloaded without root on systems with apt-get.
    """
    for directory in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix, "lib"), *_fetched_directories()):
        if directory and Path(directory, LIBPYTHON).exists():
            return [Path(directory)]
    if _is_loadable(LIBPYTHON):
        return []
    _fetch_debian_package(f"libpython{PYTHON}")
    for directory in _fetched_directories():
        if Path(directory, LIBPYTHON).exists():
            return [directory]
    raise ServerNotFoundError(
        f"the server's Python stub needs {LIBPYTHON}: {sys.executable} has none, and none is installed"
        f" (Debian and Ubuntu: apt install libpython{PYTHON})"
    )


def _is_loadable(library: str) -> bool:
    """Return whether the loader finds a library. Tried in another process, because a library cannot be unloaded."""
    code = f"import ctypes; ctypes.CDLL({library!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def _fetched() -> Path:
    return cache_directory() / "debian"


def _fetched_directories() -> list[Path]:
    return [file.parent for file in _fetched().glob(f"usr/lib/*/{LIBPYTHON}")]


def _fetch_debian_package(name: str) -> None:
    """Download a Debian package and unpack it in the cache, without root. Does nothing on other systems."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        return
    with tempfile.TemporaryDirectory() as scratch:
        print(f"Downloading {name}, which the server needs and is not installed", flush=True)
        download = ["apt-get", "-qq", "download", name]
        if subprocess.run(download, cwd=scratch, check=False).returncode and os.geteuid() == 0:
            # The package lists of a new machine are empty; only root can update them.
            subprocess.run(["apt-get", "-qq", "update"], check=False)
            subprocess.run(download, cwd=scratch, check=False)
        for package in Path(scratch).glob("*.deb"):
            _fetched().mkdir(parents=True, exist_ok=True)
            subprocess.run(["dpkg", "-x", package, _fetched()], check=True)


def main() -> int:
    """Prepare the server and print what will be used."""
    try:
        files = find_server()
    except ServerNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"tritonserver: {files.binary}")
    analyzer = perf_analyzer()
    print(f"perf_analyzer: {analyzer[0] if analyzer else 'cannot run here: it needs glibc 2.34 and tritonclient'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
