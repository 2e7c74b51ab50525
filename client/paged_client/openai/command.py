"""Runs the OpenAI-compatible gateway: until Ctrl-C, or beside a server on a thread of its process."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paged_client.discovery import find_models, listed, no_model
from paged_client.openai import keys
from paged_client.openai.app import Settings, create_app
from paged_client.openai.chat_template import ChatTemplate
from paged_client.openai.framing import bounded_protocol
from paged_client.openai.limits import GatewayLimits
from paged_client.openai.models import FIND_SECONDS
from paged_client.openai.tool_calls import FORMATS
from paged_client.session import UsageError
from paged_client.sync_client import DEFAULT_URLS
from paged_client.types import PagedError

OTHER_DESCRIPTORS = 256  # file descriptors of this process that connections must not take
SHUTDOWN_SECONDS = 30  # time for open streams to finish, as with `paged serve`
CUT_SECONDS = 2  # time for streams that are cut to send the error


def run(
    *,
    url: str | None,
    models: Sequence[str],
    tokenizers: Sequence[tuple[str | None, Path]],
    host: str,
    port: int,
    api_keys: Sequence[str],
    api_key_file: Path | None,
    chat_template_timeout: float,
    max_open_requests: int,
    max_request_bytes: int,
    max_open_bytes: int,
    max_prompts: int,
    max_inputs: int,
    body_timeout: float,
    tool_parser: str,
    access_log: bool,
    retry_seconds: float,
    allowed_origins: Sequence[str],
    root_path: str,
) -> int:
    """Serve until Ctrl-C and return the exit code. Raises UsageError for invalid arguments."""
    try:
        served = models or _find_models(url or DEFAULT_URLS["grpc"])
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    _check_tokenizers(tokenizers, models, served)
    templates = {name: _load(directory, chat_template_timeout) for name, directory in tokenizers}
    try:
        all_keys = keys.collect(api_keys, api_key_file, os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from None
    settings = Settings(
        url=url,
        models=served,
        are_models_fixed=bool(models),
        templates=templates,
        api_keys=all_keys,
        limits=GatewayLimits(
            max_open_requests, max_request_bytes, max_open_bytes, max_prompts, max_inputs, body_timeout
        ),
        tool_format=None if tool_parser == "auto" else FORMATS[tool_parser],
        access_log=_log_line if access_log else None,
        retry_seconds=retry_seconds,
        allowed_origins=allowed_origins,
        root_path=root_path,
    )
    try:
        app = create_app(settings)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    try:
        listener = listen(host, port)
    except OSError as error:
        raise UsageError(f"--host {host} --port {port}: {error.strerror}") from None
    print(
        f"OpenAI-compatible API of {', '.join(served) or 'all models'} at {url or DEFAULT_URLS['grpc']}: http://{host}:{port}/v1",
        flush=True,
    )
    server = _Server(app, settings.limits)
    server.serve_on(listener)
    if server.interrupted:
        raise KeyboardInterrupt
    return 0


class BackgroundGateway:
    """A gateway of one model, on a thread of this process. It has the default settings of `paged openai`.

    Args:
        server_url: gRPC endpoint of the server.
        model: name of the model.
        host, port: address to listen on.

    Raises ValueError if PAGED_API_KEYS is set and has no key.
    """

    def __init__(self, server_url: str, model: str, host: str, port: int) -> None:
        self.port = port
        self._host = host
        settings = Settings(
            url=server_url,
            models=(model,),
            are_models_fixed=True,
            templates={},
            api_keys=keys.collect((), None, os.environ),
            limits=GatewayLimits(),
            tool_format=None,
            access_log=None,
        )
        self.needs_key = bool(settings.api_keys)
        self._server = _Server(create_app(settings), settings.limits)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, and serve until `stop`. Does nothing if it has started. Raises OSError."""
        if self._thread is None:
            listener = listen(self._host, self.port)
            # A daemon, so that the process can end although a client keeps a stream open.
            self._thread = threading.Thread(target=self._server.serve_on, args=(listener,), name="openai", daemon=True)
            self._thread.start()

    def stop(self, *, at_once: bool = False) -> None:
        """Accept no more requests, and let open streams finish, or cut them if `at_once`. Returns immediately."""
        self._server.should_exit = True
        self._server.force_exit |= at_once

    def join(self) -> None:
        """Wait until the gateway has ended, after `stop`."""
        if self._thread is not None:
            self._thread.join()


def _find_models(url: str) -> list[str]:
    """Return the names of the server's models. Writes a warning if it has none or cannot be reached.

    Raises ValueError for an invalid URL.
    """
    try:
        if found := find_models(url, "grpc", FIND_SECONDS):
            return found
        raise no_model(url)
    except PagedError as error:
        _log_line(f"warning: {error.message}; requests fail until this has changed, unless --model names the models")
        return []


def _check_tokenizers(
    tokenizers: Sequence[tuple[str | None, Path]], models: Sequence[str], served: Sequence[str]
) -> None:
    """Raise UsageError for tokenizers of which it is not clear, or not possible, that they belong to a model.

    models: the given names; served: those, or the models that were found.
    """
    names = [name for name, _ in tokenizers]
    for name, directory in tokenizers:
        if name is None and len(names) > 1:
            raise UsageError(f"--tokenizer {directory}: there are several tokenizers; give each as NAME=DIR")
        if name is None and len(served) > 1:
            raise UsageError(
                f"--tokenizer {directory}: there are several models ({listed(served)}); give it as NAME=DIR"
            )
        if names.count(name) > 1:
            raise UsageError(f"--tokenizer {name}={directory}: {name} has {names.count(name)} tokenizers")
        if name is not None and models and name not in models:
            raise UsageError(f"--tokenizer {name}={directory}: --model does not name {name}")
        if name is not None and served and name not in served:
            _log_line(f"warning: --tokenizer {name}={directory}: the server has no such model; it has {listed(served)}")


def _load(directory: Path, seconds: float) -> ChatTemplate:
    _log_line(f"loading the tokenizer {directory} ...")  # it takes several seconds, including transformers' import
    try:
        return ChatTemplate(directory, seconds)
    except ValueError as error:
        raise UsageError(f"--tokenizer {error}") from None


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket with TCP_NODELAY, which its connections inherit. Raises OSError.

    Without TCP_NODELAY the body of a response waits 40 ms for the client to acknowledge its headers. asyncio sets it
    only for sockets that were created with a protocol number, which is not the case here.
    """
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _log_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Server(uvicorn.Server):
    """A server that exits on a signal without raising it again.

    uvicorn raises the signal again, which a background process of a shell ignores.
    """

    interrupted = False  # whether Ctrl-C was pressed

    def __init__(self, app: FastAPI, limits: GatewayLimits) -> None:
        _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))  # one for each connection
        most = sys.maxsize if descriptors == resource.RLIM_INFINITY else max(1, descriptors - OTHER_DESCRIPTORS)
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(most, limits.body_timeout),
                access_log=False,
                log_level="warning",
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
                lifespan="on",
            )
        )

    def serve_on(self, listener: socket.socket) -> None:
        """Serve until a signal, or `should_exit`, and close the socket. On another thread signals have no effect."""
        with listener:
            self.run(sockets=[listener])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Also end the application if streams are cut. uvicorn would cancel it, and log that as an error."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()  # closes the client, which ends the requests that are open
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=CUT_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self.interrupted |= sig == signal.SIGINT
