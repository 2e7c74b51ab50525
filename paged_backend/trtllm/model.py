"""The class that Triton's Python backend loads for the models in front of the engine. It does not import torch, so the
models load at once."""

from __future__ import annotations

import faulthandler
import json
import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from paged_backend.trtllm.interfaces import create_interface
from paged_backend.trtllm.limits import RelayLimits
from paged_backend.trtllm.relay import Relay


class TritonPythonModel:
    """Reads config.pbtxt, creates the `Relay`, and passes requests on to it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the relay. The server reports the message of an error for the model."""
        faulthandler.enable()  # writes all threads' tracebacks to the server's log if a signal kills the process
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        streams = bool(config["model_transaction_policy"]["decoupled"])
        try:
            limits = RelayLimits.from_parameters(parameters)
        except ValueError as error:
            raise pb_utils.TritonModelException(f"config.pbtxt: {error}") from None
        interface = create_interface(parameters["interface"], streams=streams, limits=limits)
        self.relay = Relay(pb_utils, args["model_name"], parameters["engine_model_name"], interface, limits)

    def execute(self, requests: list[Any]) -> None:
        """Forward each request and return. Responses are sent through its response sender, from other threads."""
        for request in requests:
            self.relay.submit(request)

    def finalize(self) -> None:
        """Stop the relay. Triton calls this once the model's requests have ended."""
        self.relay.stop()
