"""Loads the Triton kernels natively where there is a GPU, and for Triton's interpreter elsewhere.

Triton decides on the interpreter when it is imported, and another test's imports may have been first; then it
is imported anew. The variable is set only during the import and these tests: servers that other tests start
must not inherit it.
"""

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from paged_kernels.cpu import build

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


if not HAS_GPU:
    _import_for_interpreter()

if any(map(shutil.which, build.COMPILERS)):
    assert build.main() == 0


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """Where the Triton kernels run: the GPU if there is one, the interpreter on CPU tensors otherwise."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session")
def compiled_environment() -> dict[str, str]:
    """An environment for a process of its own, in which Triton compiles."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), kept.get("PYTHONPATH", "")])}
