"""What a worker is asked for. Needs no package of Dynamo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class WorkerSettings:
    """What `paged dynamo` was asked for."""

    url: str  # gRPC endpoint of the server
    models: tuple[str, ...]  # names on the server
    served_name: str | None = None  # name of the only model for Dynamo's clients; None: as on the server
    model_path: Path | None = None  # directory with the only model's tokenizer; None: the server's own path
    namespace: str = "dynamo"
    component: str | None = None  # None: by the role
    role: str = "aggregated"
    discovery: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None
    tool_call_parser: str | None = None  # "none": no parser. None: by the chat template
    reasoning_parser: str | None = None
    kv_events: str | None = None  # ZeroMQ endpoint of the server's KV cache events; None: the server's own
    environment: Mapping[str, str] = field(default_factory=dict)  # further environment variables of the process
