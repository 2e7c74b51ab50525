"""Tests of the client library: requests, responses, and how requests end."""

import subprocess
import sys
from pathlib import Path


def test_importing_the_client_imports_no_transport():
    code = "import sys, client; print({'grpc', 'aiohttp', 'numpy', 'tritonclient'} & sys.modules.keys())"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
