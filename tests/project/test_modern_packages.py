"""The newest packages, which containers have: numpy 2, transformers, tritonclient, protobuf, OpenTelemetry.

`make test-modern` runs all tests that need no tritonserver with them, on Python 3.12 if it is found. Its environment
takes minutes to install, most of them for PyTorch. Here the packages that differ from those of this environment are
installed in a folder that comes before it, for this Python, and the modules run that use them.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paged_client.serving.server_files import cache_directory

ROOT = Path(__file__).resolve().parents[2]
NAMED = ("numpy", "transformers", "tritonclient", "protobuf", "opentelemetry-exporter-otlp-proto-http")
CUDA = ("nvidia-", "cuda-")  # packages of PyTorch's CUDA build, which is installed or not
TESTS = (
    # the class that Triton loads, its tensors, and traces
    *("server/test_triton_model.py", "server/wire/test_channel.py", "server/wire/test_tensors.py"),
    *("server/test_service.py", "server/streams/test_tracing.py"),
    # the clients and the gateway
    *("client/test_grpc_wire.py", "client/test_sync_client.py", "client/test_async_client.py"),
    *("client/test_sync_grpc.py", "client/test_async_grpc.py", "client/openai/test_streaming.py"),
    # what is loaded with transformers
    *("loading/test_weights.py", "loading/test_architectures.py", "files/test_generation_config.py"),
    *("loading/test_gguf_blocks.py", "text/test_tokenizing.py", "text/test_chat_templates.py"),
    # the engine, with the compiled kernels
    *("engine/test_assembly.py", "execution/test_batch.py", "sampling/test_masks.py", "models/test_rope.py"),
    *("kernels/cpu/test_decoder_layer.py", "integration/test_families.py::test_prefix_hit"),
)


def differing() -> dict[str, str]:
    """Return the versions in constraints-modern.txt that are not those of this environment, by name."""
    installed = {canonicalize_name(one.metadata["Name"]): one.version.partition("+")[0] for one in distributions()}
    lines = (ROOT / "constraints-modern.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {
        pin.name: str(pin.specifier).removeprefix("==")
        for pin in pins
        if not pin.name.startswith(CUDA) and (pin.marker is None or pin.marker.evaluate())
    }
    return {name: version for name, version in versions.items() if installed.get(name) != version}


def install(versions: dict[str, str]) -> Path:
    """Return a folder of the cache with these packages, which is made once."""
    requirements = [f"{name}=={version}" for name, version in versions.items()]
    text = "\n".join([sys.version, *requirements])
    directory = cache_directory() / f"modern-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not directory.exists():
        partial = directory.with_name(f".{directory.name}.{os.getpid()}")
        options = "--quiet --disable-pip-version-check --no-deps --no-compile --target"
        command = [sys.executable, "-m", "pip", "install", *options.split(), partial, *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for old in directory.parent.glob("modern-*"):
            shutil.rmtree(old)
        partial.rename(directory)
    return directory


@pytest.mark.skipif(Path(sys.prefix).name == ".venv-modern", reason="all tests run with these packages")
def test_the_newest_packages(figures, tmp_path):
    versions = differing()
    assert versions.keys() >= set(NAMED), "make lock"
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'files'}"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{name}" for name in TESTS)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(install(versions))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = ", ".join(f"{name} {versions[name]}" for name in NAMED)
    figures(f"Python {platform.python_version()}, {names}: {done.stdout.strip().splitlines()[-1].strip('= ')}")
