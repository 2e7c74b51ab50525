"""The settings of Dynamo's processes. Imports no package of Dynamo, which may be installed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerSettings:
    """A worker, in front of one server."""

    url: str  # gRPC endpoint of the server
    models: Sequence[str]  # names on the server
    served_name: str | None = None  # name of the only model for Dynamo's clients; None: as on the server
    model_path: str | None = None  # directory with the only model's tokenizer; None: the server's own path
    namespace: str = "dynamo"
    component: str | None = None  # None: by the role
    role: str = "aggregated"  # or "prefill" or "decode"
    discovery: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None  # None: Dynamo's choice
    tool_call_parser: str | None = None  # "none": no parser. None: by the chat template
    reasoning_parser: str | None = None
    kv_events: str | None = None  # ZeroMQ endpoint of the server's KV cache events; None: the server's own
    publishes: bool = True  # whether routers learn what the server has cached, and its load


@dataclass(frozen=True)
class FrontendSettings:
    """A frontend, which takes the workers' discovery and planes."""

    host: str
    port: int
    flags: Sequence[str] = ()  # further options, such as `processes.router_flags`
