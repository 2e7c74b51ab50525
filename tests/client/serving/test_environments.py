"""Tests of the virtual environments of other packages, with packages from a local directory."""

import subprocess
import zipfile

import pytest

from paged_client.serving.environments import EnvironmentSetupError, PackageEnvironment
from tests.support.locked_environment import LockedEnvironment


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A directory that is the only package index of pip."""
    found = tmp_path / "wheels"
    found.mkdir()
    for name, value in {"PAGED_CACHE_DIR": tmp_path / "cache", "PIP_NO_INDEX": 1, "PIP_FIND_LINKS": found}.items():
        monkeypatch.setenv(name, str(value))
    return found


def put(wheels):
    with zipfile.ZipFile(wheels / "an_engine-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("an_engine.py", "")
        about = "Metadata-Version: 2.1\nName: an-engine\nVersion: 1.2\nRequires-Dist: torchvision\n"
        wheel.writestr("an_engine-1.2.dist-info/METADATA", about + "Requires-Dist: another; extra == 'gpu'\n")
        wheel.writestr("an_engine-1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("an_engine-1.2.dist-info/RECORD", "")


@pytest.mark.nightly
def test_package_environment_is_created_once(wheels, capsys):
    environment = PackageEnvironment("engine", "an-engine", "1.2", exclude=("torch",))
    with pytest.raises(EnvironmentSetupError, match=r"an-engine 1\.2: ERROR: .*an-engine==1\.2"):
        environment.ensure()
    assert not environment.ready
    put(wheels)
    environment.ensure()
    assert environment.ready
    subprocess.run([environment.python, "-c", "import an_engine"], check=True)
    assert "an-engine 1.2: set up in " in capsys.readouterr().err
    environment.ensure()
    assert capsys.readouterr().err == ""


@pytest.mark.nightly
def test_locked_environment_has_exactly_its_requirements(wheels, tmp_path):
    put(wheels)
    file = tmp_path / "pinned.txt"
    file.write_text("# Its requirements would not be found.\nan-engine==1.2\n")
    environment = LockedEnvironment("clients", file)
    environment.ensure()
    subprocess.run([environment.python, "-c", "import an_engine"], check=True)
    file.write_text("an-engine==1.3\n")
    assert not environment.ready  # another list, another environment
