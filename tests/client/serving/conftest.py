"""A model repository with a model that loads immediately."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

ECHO_MODEL = """
import json, pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils
import paged_backend.api.request  # the project is importable

class TritonPythonModel:
    def initialize(self, args):
        self.options = json.loads((pathlib.Path(__file__).parent / "model.json").read_text())
        if "wrong" in self.options:
            raise ValueError(f"wrong={self.options['wrong']}: unknown option")
        print("initializing", flush=True)
        time.sleep(self.options.get("load_seconds", 0))

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            output = pb_utils.Tensor("text_output", np.array([json.dumps(self.options)], object))
            sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        print("finalized", flush=True)
"""


@pytest.fixture
def repository(tmp_path):
    """A model repository like the project's, with a model that loads immediately."""
    version = tmp_path / "repository" / "paged_llm" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(ECHO_MODEL)
    (version / "model.json").write_text('{"model": "replaced", "block_size": 16}')
    config = (ROOT / "model_repository/paged_llm/config.pbtxt").read_text()
    (version.parent / "config.pbtxt").write_text(config)
    return version.parent.parent
