"""The models that stand in front of the engine's own, as Triton's Python backend loads them. Nothing here imports
torch, so that they are ready at once."""

from __future__ import annotations

import faulthandler
import json
import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from paged_backend.trtllm.caps import RelayCaps
from paged_backend.trtllm.interfaces import Interface
from paged_backend.trtllm.relay import Relay


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        faulthandler.enable()  # what the threads were at goes to the server's log where a signal ends the process
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        config = json.loads(args["model_config"])
        given = {name: value["string_value"] for name, value in config["parameters"].items()}
        streams = bool(config["model_transaction_policy"]["decoupled"])
        try:
            caps = RelayCaps.from_parameters(given)
        except ValueError as error:
            raise pb_utils.TritonModelException(f"config.pbtxt: {error}") from None
        interface = Interface(given["interface"], streams=streams, caps=caps)
        self.relay = Relay(pb_utils, args["model_name"], given["engine_model_name"], interface, caps)

    def execute(self, requests: list[Any]) -> None:
        """Begin each request and return; answers go out through its response sender, from other threads."""
        for request in requests:
            self.relay.submit(request)

    def finalize(self) -> None:
        self.relay.stop()
