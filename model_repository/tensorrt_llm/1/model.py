"""A model of tensorrtllm_backend's, in front of the engine in `paged_llm`: see paged_backend/trtllm/."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
if (_ROOT / "paged_backend").is_dir():  # a checkout serves as it stands; elsewhere the package is installed
    sys.path[:0] = [str(_ROOT), str(_ROOT / "kernels")]

from paged_backend.trtllm.model import TritonPythonModel  # noqa: E402, F401
