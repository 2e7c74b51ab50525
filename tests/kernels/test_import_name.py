"""The import name `kernels` belongs to the PyPI package that transformers loads FP8, MXFP4 and GPTQ kernels from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pairwise import mostly_nightly

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.17.2"  # of the package in these tests


def run(code: str, **environment: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,  # from here `import kernels` could find the folder kernels/
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def installed(tmp_path):
    """The search path with a package like the one from PyPI."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text(f"__version__ = {VERSION!r}\n")
    (tmp_path / f"kernels-{VERSION}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: kernels\nVersion: {VERSION}\n"
    (tmp_path / f"kernels-{VERSION}.dist-info/METADATA").write_text(metadata)
    (tmp_path / f"kernels-{VERSION}.dist-info/top_level.txt").write_text("kernels\n")
    return os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(tmp_path)])


def test_pypi_kernels_and_paged_kernels_are_imported_side_by_side(installed, tmp_path):
    code = (
        "import kernels, paged_kernels.cpu.build; print(kernels.__version__, kernels.__file__, paged_kernels.__file__)"
    )
    version, theirs, ours = run(code, PYTHONPATH=installed).split()
    assert version == VERSION
    assert Path(theirs) == tmp_path / "kernels/__init__.py"
    assert Path(ours) == ROOT / "kernels/paged_kernels/__init__.py"


@pytest.mark.nightly
def test_transformers_finds_the_pypi_package_beside_paged_kernels(installed):
    """Whether transformers then uses it depends on the range of versions that it supports."""
    code = (
        "import paged_kernels.ops; from transformers.utils.import_utils import _is_package_available;"
        "print(*_is_package_available('kernels', return_version=True))"
    )
    assert run(code, PYTHONPATH=installed) == f"True {VERSION}"


@pytest.mark.parametrize(
    "modules",
    mostly_nightly(
        ["paged_kernels", "transformers.models.llama.modeling_llama, paged_kernels.ops"], default=["paged_kernels"]
    ),
)
def test_transformers_does_not_take_the_folder_kernels_for_the_package(modules):
    """Without the PyPI package, the folder is a namespace package of that name; transformers must not use it."""
    hide = (
        "import importlib.metadata as metadata, sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'kernels':\n"
        "            from importlib.machinery import PathFinder\n"
        f"            return PathFinder.find_spec(name, [{str(ROOT)!r}])\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "version = metadata.version\n"
        "def installed(name):\n"
        "    if name == 'kernels': raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = installed\n"
    )
    code = hide + (
        "from transformers.utils.import_utils import is_kernels_available\n"
        f"import {modules}\n"
        "print(is_kernels_available())"
    )
    assert run(code) == "False"
