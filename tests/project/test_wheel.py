"""The files of a wheel, and that its command line works without the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.architecture import SOURCE_ROOTS

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "paged_kernels/cpu/built/paged_cpu-test.so"
BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """A wheel that is built from a copy of the sources, with an empty file as compiled library."""
    copy = tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("__pycache__", "built")
    for name in ("client", "kernels", "model_repository", "paged_backend", "paged_bench"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    (copy / "kernels" / LIBRARY).parent.mkdir()
    (copy / "kernels" / LIBRARY).touch()
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    return zipfile.ZipFile(next((copy / "dist").glob("*.whl")))


def files(directory: Path, root: Path) -> set[str]:
    ignored = {"__pycache__", "built"}
    found = {file.relative_to(root) for file in directory.rglob("*") if file.is_file()}
    return {str(file) for file in found if ignored.isdisjoint(file.parts) and file.suffix != ".md"}


def test_wheel_has_all_files_of_the_packages_and_no_others(wheel):
    expected = {LIBRARY}
    for package, root in SOURCE_ROOTS.items():
        expected |= files(root / package, root)
    expected |= {f"paged_client/{file}" for file in files(ROOT / "model_repository", ROOT)}
    assert {"paged_client/model_repository/paged_llm/1/model.json", "paged_kernels/cpu/csrc/pool.cpp"} < expected
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_wheel_has_the_license_and_the_commands(wheel):
    info = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "License-Expression: BSD-3-Clause" in wheel.read(f"{info}/METADATA").decode().splitlines()
    commands = {line.partition(" = ")[0] for line in wheel.read(f"{info}/entry_points.txt").decode().splitlines()}
    assert commands >= {"paged", "tritonserver"}


def test_installed_command_writes_a_model_repository(wheel, tmp_path):
    wheel.extractall(tmp_path / "packages")
    (tmp_path / "model").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PAGED_CACHE_DIR"}
    environment |= {"PYTHONPATH": str(tmp_path / "packages"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "paged_client", "model-repository", "model"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (printed,) = done.stdout.splitlines()
    assert Path(printed).is_relative_to(tmp_path / "cache/paged_llm")
    assert files(Path(printed), Path(printed)) == files(ROOT / "model_repository", ROOT / "model_repository")
    assert f'"model": "{tmp_path}/model"' in Path(printed, "paged_llm/1/model.json").read_text()
