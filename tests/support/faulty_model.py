"""The model class that Triton loads in place of `TritonPythonModel` where a test injects faults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import triton_python_backend_utils as pb_utils

from paged_backend.server.triton_model import TritonPythonModel
from tests.support import faults


class FaultyModel(TritonPythonModel):
    """Serves with the faults that the file beside model.py names."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model with a service that injects the faults."""
        from paged_backend.server import service  # not earlier: see TritonPythonModel.initialize

        asked = faults.parse(Path(pb_utils.get_model_dir(), faults.FILE).read_text())
        service.Service = faults.faulty_service(asked)  # type: ignore[misc]
        super().initialize(args)
