"""A wheel in an environment of its own, outside of the repository: `paged serve` and plain tritonserver."""

import json
import shlex
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from paged_client.serving.demo_model import NAME
from paged_client.serving.ports import choose_ports
from paged_kernels.cpu.build import COMMON, LEVELS, library, supported
from tests.support.triton import STARTED, started
from tests.support.waiting import WAIT, until

ROOT = Path(__file__).parents[2]
SOURCES = ("client", "kernels", "model_repository", "paged_backend", "paged_bench")
PRINT_LEVELS = "from paged_kernels.cpu import native; print(*native.levels())"

pytestmark = pytest.mark.nightly


def run(*command: str | Path, **settings) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **settings)
    assert done.returncode == 0, done.stdout
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and another directory to work in."""

    prefix: Path
    directory: Path
    variables: dict[str, str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel that `make wheel` writes from a copy of the sources, with the libraries that are compiled already."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    run("make", "--old-file=setup", "wheel", f"VENV={sys.prefix}", cwd=copy)
    (made,) = (copy / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel, demo_model, tmp_path_factory) -> Installed:
    prefix, directory = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("directory")
    run(sys.executable, "-m", "venv", prefix)
    run(prefix / "bin/pip", "install", "-c", ROOT / "constraints.txt", f"{wheel}[server]", cwd=directory)
    models = directory / ".cache/paged_llm/models"
    models.mkdir(parents=True)
    (models / NAME).symlink_to(demo_model)
    # Without a compiler: the kernels come from the wheel.
    variables = {"HOME": str(directory), "PATH": f"{prefix / 'bin'}:/usr/bin:/bin", "CXX": "/bin/false"}
    return Installed(prefix, directory, variables)


def answer(port: int, model: str, body: dict) -> str:
    request = urllib.request.Request(f"http://localhost:{port}/v2/models/{model}/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=WAIT) as reply:
        return json.loads(reply.read())["text_output"]


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/v2/health/ready", timeout=WAIT) as reply:
            return reply.status == 200
    except OSError:
        return False


def test_wheel_runs_on_all_supported_versions_of_cpython(wheel):
    name, version, *tags = wheel.name.removesuffix(".whl").split("-")
    assert (name, version, tags[:2]) == ("paged_llm_triton", "0.1.0", ["py3", "none"])
    assert tags[2].startswith("manylinux_2_")


def test_wheel_has_the_kernels_of_all_levels(wheel, installed):
    libraries = {f"paged_kernels/cpu/built/{library(name).name}" for name in (*LEVELS, COMMON)}
    assert {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")} == libraries
    printed = run("python", "-c", PRINT_LEVELS, cwd=installed.directory, env=installed.variables)
    assert tuple(printed.split()) == supported()


def test_paged_serve(installed):
    http, grpc, metrics = choose_ports(http=0, grpc=0, metrics=0)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    command = [installed.prefix / "bin/paged", "serve", "demo", *ports]
    with started(command, installed.variables, "Press Ctrl-C", installed.directory) as (_, log):
        assert "Kernels: C++, level" in "".join(log)
        body = {"text_input": "The capital of France is", "max_tokens": 4, "temperature": 0}
        assert "Paris" in answer(http, "paged_llm", body)


def test_plain_tritonserver(installed):
    http, grpc, metrics = choose_ports(http=0, grpc=0, metrics=0)
    script = (
        f". {shlex.quote(str(installed.prefix / 'bin/activate'))}\n"
        'exec tritonserver --model-repository "$(paged model-repository)"'
        f" --http-port={http} --grpc-port={grpc} --metrics-port={metrics}"
    )
    with started(["bash", "-euc", script], installed.variables, STARTED, installed.directory) as (_, log):
        until(lambda: is_ready(http), "a server that is ready")
        assert "Kernels: C++, level" in "".join(log)
        body = {"text_input": "The capital of France is", "max_tokens": 4, "temperature": 0}
        assert "Paris" in answer(http, "paged_llm", body)
        assert "Paris" in answer(http, "ensemble", {**body, "bad_words": "", "stop_words": ""})
