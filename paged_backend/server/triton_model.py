"""The model that Triton's Python backend loads, from a model repository or as a backend of its own: read, submit,
return."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.server.placement import GPU_DEVICE_IDS, visible_gpus
from paged_backend.server.tensors import INPUTS, OUTPUTS


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(model_config: Any) -> Any:
        """Add what config.pbtxt leaves out. The server refuses one that declares a tensor otherwise."""
        given = model_config.as_dict()
        declared = {one["name"] for one in given["input"]}
        for name, spec in INPUTS.items():
            optional = {} if name in declared else {"optional": True}
            model_config.add_input({"name": name, "data_type": spec.data_type, "dims": list(spec.dims), **optional})
        for name, spec in OUTPUTS.items():
            model_config.add_output({"name": name, "data_type": spec.data_type, "dims": list(spec.dims)})
        model_config.set_model_transaction_policy({"decoupled": True})
        model_config.set_max_batch_size(0)
        return model_config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model and start the engine. An error's message is what the server reports for the model."""
        faulthandler.enable()  # what the threads were at goes to the server's log where a signal ends the process
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        version = Path(pb_utils.get_model_dir())
        labels = {"model": args["model_name"], "version": args["model_version"]}
        parameters = json.loads(args["model_config"])["parameters"]
        try:
            config = EngineConfig.from_file(version / "model.json")
            _pin(args, parameters, config)
            if _parameter(parameters, "REPORT_CUSTOM_METRICS").lower() == "false":
                config = replace(config, disable_log_stats=True)
            # Only now: the server also starts this file to read its configuration, and that should not load torch.
            from paged_backend.server.service import Service

            self.service = Service(config, pb_utils, labels, version / "multi_lora.json")
        except ConfigError as error:
            raise pb_utils.TritonModelException(f"{type(error).__name__}: {error}") from None

    def execute(self, requests: list[Any]) -> None:
        """Queue each request and return; answers go out through its response sender, from another thread."""
        for request in requests:
            self.service.submit(request)

    def is_ready(self) -> bool:
        return self.service.ready

    def finalize(self) -> None:
        self.service.stop()


def _parameter(parameters: Mapping[str, Any], name: str) -> str:
    """One of config.pbtxt's, "" where it has none of this name."""
    return parameters.get(name, {}).get("string_value", "")


def _pin(args: Mapping[str, str], parameters: Mapping[str, Any], config: EngineConfig) -> None:
    """Hide the GPUs that are other instances'. Before CUDA is begun, which reads this once."""
    gpus = visible_gpus(
        args["model_instance_kind"],
        int(args["model_instance_device_id"]),
        _parameter(parameters, GPU_DEVICE_IDS),
        config.tensor_parallel_size,
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
