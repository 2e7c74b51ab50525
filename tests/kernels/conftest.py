"""Loads the Triton kernels natively on a GPU, and for Triton's interpreter elsewhere.

Triton chooses the interpreter when it is imported, and other tests may have imported it before; then it is imported
again. The variable is set only during the import and these tests, since servers that other tests start must not
inherit it.
"""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from paged_kernels import launch_table
from paged_kernels.cpu import native

HAS_GPU = torch.cuda.is_available()
ROOT = Path(__file__).resolve().parents[2]
WITH_KERNELS = [
    f"paged_kernels.{file.stem}"
    for file in sorted((ROOT / "kernels/paged_kernels").glob("*.py"))
    if file.stem not in ("aot", "tune") and "\nimport triton\n" in file.read_text()
]


def _import_for_interpreter() -> None:
    triton = sys.modules.get("triton")
    if triton is not None and type(triton.language.max).__name__ != "InterpretedFunction":
        for name in [n for n in sys.modules if n in WITH_KERNELS or n == "triton" or n.startswith("triton.")]:
            if not name.startswith("triton._C"):  # the native library cannot be loaded twice
                del sys.modules[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in WITH_KERNELS:
            importlib.import_module(name)
        from tests.support.interpreter import speed_up

        speed_up()


if not HAS_GPU:
    _import_for_interpreter()

native.compile_on_demand()


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """The device of the Triton kernels: the GPU if there is one, else the CPU, where the interpreter runs them."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session")
def compiled_environment() -> dict[str, str]:
    """The environment of a subprocess in which Triton compiles."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "client"), kept.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the tables that a test uses."""
    monkeypatch.setattr(launch_table, "_tables", {})
