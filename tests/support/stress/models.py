"""Loads and unloads the model of a server with `--model-control-mode=explicit`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import tritonclient.grpc as grpcclient

from tests.support.stress.requests import MODEL
from tests.support.stress.server import Server
from tests.support.waiting import until


class Models:
    """Loads and unloads the model over gRPC. Over HTTP, it would block one of the server's few HTTP threads."""

    def __init__(self, server: Server, repository: Path):
        self._control = grpcclient.InferenceServerClient(server.grpc_url)
        self._control.is_server_live()  # opens the connection
        self._repository = repository

    def load(self) -> None:
        self._control.load_model(MODEL)

    def start_unloading(self) -> None:
        """Start unloading. The server first waits until all open requests have ended and their streams are closed."""
        self._control.unload_model(MODEL)

    def unload(self) -> None:
        self.start_unloading()
        until(lambda: self._state() == ("UNAVAILABLE", "unloaded"), "the model's end")

    def replace(self) -> None:
        """Replace the instance while it serves. The server does so because the files have a new modification time."""
        now = time.time_ns()
        os.utime(self._repository / MODEL / "1" / "model.json", ns=(now, now))
        self.load()

    def close(self) -> None:
        self._control.close()

    def _state(self) -> tuple[str, str]:
        """Return the state of the model, and its reason."""
        models = {one.name: one for one in self._control.get_model_repository_index().models}
        return models[MODEL].state, models[MODEL].reason
