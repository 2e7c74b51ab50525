"""Finds the names under which a server serves the engine."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from paged_client.addresses import grpc_target, http_base
from paged_client.connection_errors import UnreachableError, unreachable
from paged_client.types import PagedError

DEFAULT_MODEL = "paged_llm"
DISCOVERY_SECONDS = 10.0
_OWN_TENSOR = "pool_map"  # an input that only the engine's model has
_LISTED = 20  # model names in an error message


class _Server(Protocol):
    def ready_models(self) -> list[str]: ...

    def inputs(self, model: str) -> set[str]: ...

    def close(self) -> None: ...


def find_model(url: str, protocol: str, timeout: float | None = None) -> str:
    """Return the name of the model of a server that is served by this engine.

    It is `paged_llm` if the server has a model of that name, or the only model with this engine's tensors.

    Args:
        url: address for `protocol`, as for `Client`.
        timeout: time limit of each call to the server, in seconds; None is 10 seconds.

    Raises PagedError with code NOT_FOUND if there is no such model or several, UnreachableError without a connection.
    """
    with closing(_connect(url, protocol, timeout)) as server:
        models = server.ready_models()
        if DEFAULT_MODEL in models:
            return DEFAULT_MODEL
        own = _own_models(server, models)
    if len(own) == 1:
        return own[0]
    if own:
        raise PagedError("NOT_FOUND", f"{url} serves several models; choose one with --model: {listed(own)}")
    raise no_model(url, models)


def find_models(url: str, protocol: str, timeout: float | None = None) -> list[str]:
    """Return the names of all models of a server that are served by this engine, in alphabetical order.

    Arguments and errors as for `find_model`, but any number of models is possible.
    """
    with closing(_connect(url, protocol, timeout)) as server:
        return sorted(_own_models(server, server.ready_models()))


def no_model(url: str, models: Sequence[str] = ()) -> PagedError:
    """Return the error for a server without a model of this engine. models: all that it has, if they are known."""
    others = f"; its models: {listed(models)}" if models else "; it has no model that is ready"
    return PagedError("NOT_FOUND", f"{url} does not serve this engine{others}")


def _connect(url: str, protocol: str, timeout: float | None) -> _Server:
    limit = min(timeout or DISCOVERY_SECONDS, DISCOVERY_SECONDS)
    return _HttpServer(url, limit) if protocol == "http" else _GrpcServer(url, limit)


def _own_models(server: _Server, models: Sequence[str]) -> list[str]:
    return [model for model in models if _is_own(server, model)]


def _is_own(server: _Server, model: str) -> bool:
    try:
        return _OWN_TENSOR in server.inputs(model)
    except PagedError as error:
        if error.code == "NOT_FOUND":  # it has just been unloaded
            return False
        raise


def listed(names: Sequence[str]) -> str:
    """Return the first of some names as text, in alphabetical order."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(sorted(names)[:_LISTED]) + more


class _GrpcServer:
    def __init__(self, url: str, timeout: float) -> None:
        import grpc  # takes longer to import than the rest of the client
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        from paged_client import grpc_wire

        self._messages: Any = service_pb2
        self._target, self._timeout = grpc_target(url), timeout
        self._channel = grpc.insecure_channel(self._target, grpc_wire.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._rpc_errors, self._convert = grpc.RpcError, grpc_wire.rpc_error

    def ready_models(self) -> list[str]:
        reply = self._call(self._stub.RepositoryIndex, self._messages.RepositoryIndexRequest(ready=True))
        return [model.name for model in reply.models]

    def inputs(self, model: str) -> set[str]:
        reply = self._call(self._stub.ModelMetadata, self._messages.ModelMetadataRequest(name=model))
        return {tensor.name for tensor in reply.inputs}

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout)
        except self._rpc_errors as error:
            raise self._convert(error, self._target) from None

    def close(self) -> None:
        self._channel.close()


class _HttpServer:
    def __init__(self, url: str, timeout: float) -> None:
        from paged_client.http_wire import generate_url, server_of

        self._url = server_of(generate_url(url, DEFAULT_MODEL))
        self._timeout = timeout

    def ready_models(self) -> list[str]:
        reply = self._call("POST", "/v2/repository/index", {"ready": True})
        return [model["name"] for model in reply]

    def inputs(self, model: str) -> set[str]:
        return {tensor["name"] for tensor in self._call("GET", f"/v2/models/{quote(model, safe='')}")["inputs"]}

    def close(self) -> None:
        """Do nothing: no connection is kept between calls."""

    def _call(self, method: str, path: str, body: object = None) -> Any:
        from paged_client.http_wire import connection_to

        base = http_base(self._url)
        connection = connection_to(base, self._timeout)
        try:
            connection.request(method, urlsplit(base).path + path, json.dumps(body) if body else None)
            reply = connection.getresponse()
            text = reply.read()
        except TimeoutError:
            raise PagedError("DEADLINE_EXCEEDED", f"{self._url} did not answer in {self._timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self._url, "http", f"{type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if reply.status == 405:  # Triton's metrics port takes no POST
            raise UnreachableError(
                f"{self._url} is not Triton's HTTP port: HTTP 405 {reply.reason}",
                "pass the server's HTTP address with --url; by default Triton's is 8000, and 8002 its metrics port",
            )
        if reply.status != 200:
            code = "NOT_FOUND" if reply.status == 404 else "UNAVAILABLE"
            raise PagedError(code, f"{self._url}{path}: HTTP {reply.status} {reply.reason}")
        return json.loads(text)
