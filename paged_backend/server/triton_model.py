"""The class that Triton's Python backend loads, from a model repository or as a backend of its own."""

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
from paged_backend.files.start_checks import check_start, remote_cache_problem
from paged_backend.server.placement import GPU_DEVICE_IDS, visible_gpus
from paged_backend.server.wire.tensors import INPUTS, OUTPUTS

log = logging.getLogger("paged_llm")


class TritonPythonModel:
    """Reads the configuration, creates the `Service`, and passes requests on to it."""

    @staticmethod
    def auto_complete_config(model_config: Any) -> Any:
        """Add what config.pbtxt omits. Triton rejects a config that declares a tensor differently."""
        given = model_config.as_dict()
        declared = {tensor["name"] for tensor in given["input"]}
        for name, spec in INPUTS.items():
            optional = {} if name in declared else {"optional": True}
            model_config.add_input({"name": name, "data_type": spec.data_type, "dims": list(spec.dims), **optional})
        for name, spec in OUTPUTS.items():
            model_config.add_output({"name": name, "data_type": spec.data_type, "dims": list(spec.dims)})
        model_config.set_model_transaction_policy({"decoupled": True})
        model_config.set_max_batch_size(0)
        return model_config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model and start the engine. The server reports the message of an error for the model."""
        faulthandler.enable()  # writes all threads' tracebacks to the server's log if a signal kills the process
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        version = Path(pb_utils.get_model_dir())
        given = json.loads(args["model_config"])
        if not given.get("model_transaction_policy", {}).get("decoupled"):  # with --disable-auto-complete-config
            raise pb_utils.TritonModelException(
                "config.pbtxt: model_transaction_policy.decoupled=false: must be true, for streams"
            )
        labels = {"model": args["model_name"], "version": args["model_version"]}
        parameters = given["parameters"]
        try:
            config = EngineConfig.from_file(version / "model.json")
            _check_name(config.served_model_name, args["model_name"])
            _pin(args, parameters, config)
            if _parameter(parameters, "REPORT_CUSTOM_METRICS").lower() == "false":
                config = replace(config, disable_log_stats=True)
            check_start(config)
            if problem := remote_cache_problem(config):
                log.error("%s", problem)
            # Imported late: Triton also runs this file to read its configuration, which should not load torch.
            if config.num_ranks == 1:
                from paged_backend.utils.lean_import import import_transformers

                import_transformers()
            from paged_backend.server.service import Service

            instance = args["model_instance_name"]
            self.service = Service(config, pb_utils, labels, version / "multi_lora.json", instance=instance)
        except ConfigError as error:
            raise pb_utils.TritonModelException(f"{type(error).__name__}: {error}") from None

    def execute(self, requests: list[Any]) -> None:
        """Queue each request and return. Responses are sent through its response sender, from another thread."""
        for request in requests:
            self.service.submit(request)

    def is_ready(self) -> bool:
        """Return whether requests will be answered; Triton's readiness endpoint calls this."""
        return self.service.ready

    def finalize(self) -> None:
        """Stop the engine. Triton calls this once the model's requests have ended."""
        self.service.stop()


def _parameter(parameters: Mapping[str, Any], name: str) -> str:
    """Return a parameter of config.pbtxt; "" if it is not set."""
    return parameters.get(name, {}).get("string_value", "")


def _check_name(name: str | None, directory: str) -> None:
    if name and name != directory:
        raise ConfigError(
            f"served_model_name={name!r}: Triton serves this model as {directory!r}, the name of its directory in the"
            " model repository; rename the directory, or leave the option out"
        )


def _pin(args: Mapping[str, str], parameters: Mapping[str, Any], config: EngineConfig) -> None:
    """Hide the GPUs of other instances. Must run before CUDA is initialized, which reads the variable once."""
    gpus = visible_gpus(
        args["model_instance_kind"],
        int(args["model_instance_device_id"]),
        _parameter(parameters, GPU_DEVICE_IDS),
        config.num_ranks * config.data_parallel_size,
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
