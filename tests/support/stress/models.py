"""What a server with `--model-control-mode=explicit` is told to load."""

from __future__ import annotations

import os
import time
from pathlib import Path

import tritonclient.grpc as grpcclient

from tests.support.stress.asks import MODEL
from tests.support.stress.server import Server, until


class Models:
    """Over gRPC: over HTTP a load keeps one of the server's few threads busy, and with it everybody whose connection
    that thread has."""

    def __init__(self, server: Server, repository: Path):
        self._control = grpcclient.InferenceServerClient(server.grpc_url)
        self._control.is_server_live()  # from now on it has its connection
        self._repository = repository

    def load(self) -> None:
        self._control.load_model(MODEL)

    def start_unloading(self) -> None:
        """What is open ends first, and its gRPC streams have to be closed, too."""
        self._control.unload_model(MODEL)

    def unload(self) -> None:
        self.start_unloading()
        until(lambda: self._state() == ("UNAVAILABLE", "unloaded"), "the model's end")

    def replace(self) -> None:
        """By another instance, while it serves: for the server its files are other ones than before."""
        now = time.time_ns()
        os.utime(self._repository / MODEL / "1" / "model.json", ns=(now, now))
        self.load()

    def close(self) -> None:
        self._control.close()

    def _state(self) -> tuple[str, str]:
        """And why."""
        models = {one.name: one for one in self._control.get_model_repository_index().models}
        return models[MODEL].state, models[MODEL].reason
