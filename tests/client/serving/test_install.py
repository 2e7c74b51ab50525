"""Tests of `paged install-backend`."""

import subprocess
import sys
from pathlib import Path

import pytest

from paged_client.cli import main
from paged_client.serving import install

ROOT = Path(__file__).parents[3]


@pytest.fixture
def directory(tmp_path):
    """A backend directory of a server, with Triton's Python backend."""
    (tmp_path / "python").mkdir()
    return tmp_path


def imported_from(file, tmp_path):
    """Return the paths from which a Python stub imports the engine and the kernels.

    PyTorch must not be imported: a server that only requests the configuration would wait for it.
    """
    (tmp_path / "triton_python_backend_utils.py").write_text("")
    code = (
        f"import runpy, sys; runpy.run_path({str(file)!r}); assert 'torch' not in sys.modules;"
        " print(sys.modules['paged_backend.server.wire.tensors'].__file__);"
        " import importlib.util; print(importlib.util.find_spec('paged_kernels').origin)"
    )
    packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = {"PYTHONPATH": ":".join([str(tmp_path), *packages])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("arguments", [[], ["--name", "vllm"]])
def test_installed_backend_imports_the_engine(directory, arguments, capsys):
    assert main(["install-backend", str(directory), *arguments]) == 0
    file = directory / (arguments or ["", "paged"])[-1] / "model.py"
    assert capsys.readouterr().out.splitlines() == [str(file)]
    expected = [ROOT / "paged_backend/server/wire/tensors.py", ROOT / "kernels/paged_kernels/__init__.py"]
    assert imported_from(file, directory) == expected


def test_installed_package_is_last_on_sys_path(directory, monkeypatch, tmp_path):
    monkeypatch.setattr(install, "REPOSITORY_ROOT", tmp_path / "site-packages")
    (file,) = install.install(directory)
    assert f"sys.path[len(sys.path):len(sys.path)] = ['{tmp_path}/site-packages']" in file.read_text()


def test_installing_again_replaces_the_file(directory):
    (file,) = install.install(directory)
    file.write_text(file.read_text() + "old")
    assert install.install(directory) == [file]
    assert "old" not in file.read_text()
    assert sorted(path.name for path in file.parent.iterdir()) == ["model.py"]


@pytest.mark.parametrize("name", ["model.py", "libtriton_vllm.so"])
def test_other_backends_are_not_overwritten(directory, name, capsys):
    (directory / "vllm").mkdir()
    (directory / "vllm" / name).write_text("theirs")
    assert main(["install-backend", str(directory), "--name", "vllm"]) == 1
    assert f"{directory / 'vllm' / name}: belongs to another backend; move" in capsys.readouterr().err
    assert (directory / "vllm" / name).read_text() == "theirs"


@pytest.mark.parametrize("name", ["", "../up", "a b", "python"])
def test_invalid_backend_name_is_rejected(directory, name):
    with pytest.raises(ValueError, match="must be letters, digits and underscores"):
        install.install(directory, name)


def test_missing_python_backend_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "find_server", lambda: install_server(backend_directory=None))
    with pytest.raises(install.ServerNotFoundError, match="has no Python backend; use the server's own"):
        install.install(tmp_path)


def install_server(backend_directory):
    from paged_client.serving.server_files import ServerFiles

    return ServerFiles(Path("/opt/tritonserver/bin/tritonserver"), backend_directory)
