"""The class that Triton loads for the models in front of the engine."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_models_load_without_torch():
    """Triton starts each model's process twice, and pays for its imports each time."""
    code = "import sys, paged_backend.trtllm.relay; print([one for one in sys.argv[1:] if one in sys.modules])"
    heavy = ("torch", "transformers", "jinja2", "huggingface_hub", "grpc", "asyncio")
    done = subprocess.run([sys.executable, "-c", code, *heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
