"""The engine's model. See paged_backend/server/triton_model.py."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
if (_ROOT / "paged_backend").is_dir():  # a checkout runs without installation
    sys.path[:0] = [str(_ROOT), str(_ROOT / "kernels")]

from paged_backend.server.triton_model import TritonPythonModel  # noqa: E402, F401
