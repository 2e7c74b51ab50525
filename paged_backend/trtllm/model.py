"""What the model.py of each of tensorrtllm_backend's models is made of."""

from __future__ import annotations

import logging
from typing import Any

from paged_backend.trtllm.relay import Relay

ENGINE = "paged_llm"


class Model:
    """A TritonPythonModel but for the server's module, which only the server's own process has."""

    pb_utils: Any

    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.relay = Relay(self.pb_utils, args["model_name"], ENGINE)

    def execute(self, requests: list[Any]) -> None:
        """Begin each request and return; answers go out through its response sender, from other threads."""
        for request in requests:
            self.relay.submit(request)

    def finalize(self) -> None:
        self.relay.stop()
