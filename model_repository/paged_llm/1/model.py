"""The model that Triton's Python backend loads: read, submit, return. Everything else is in paged_backend/."""

import logging
import sys
from pathlib import Path

import triton_python_backend_utils as pb_utils

_ROOT = Path(__file__).resolve().parents[3]
if (_ROOT / "paged_backend").is_dir():  # a checkout serves as it stands; elsewhere the package is installed
    sys.path.insert(0, str(_ROOT))

from paged_backend.config import ConfigError, EngineConfig  # noqa: E402


class TritonPythonModel:
    def initialize(self, args):
        """Load the model and start the engine. An error's message is what the server reports for the model."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        version = Path(args["model_repository"]) / args["model_version"]
        labels = {"model": args["model_name"], "version": args["model_version"]}
        try:
            config = EngineConfig.from_file(version / "model.json")
            # Only now: the server also starts this file to read its configuration, and that should not load torch.
            from paged_backend.service import Service

            self.service = Service(config, pb_utils, labels)
        except ConfigError as error:
            raise pb_utils.TritonModelException(f"{type(error).__name__}: {error}") from None

    def execute(self, requests):
        """Queue each request and return; answers go out through its response sender, from another thread."""
        for request in requests:
            self.service.submit(request)
        return None

    def is_ready(self):
        return self.service.ready

    def finalize(self):
        self.service.stop()
