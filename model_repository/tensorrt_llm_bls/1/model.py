"""Forwards requests with tensorrtllm_backend's interface to the engine in `paged_llm`. See paged_backend/trtllm/."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
if (_ROOT / "paged_backend").is_dir():  # a checkout runs without installation
    sys.path[:0] = [str(_ROOT), str(_ROOT / "kernels")]

from paged_backend.trtllm.model import TritonPythonModel  # noqa: E402, F401
