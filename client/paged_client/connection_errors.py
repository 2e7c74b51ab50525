"""Errors of a server that cannot be reached: which address, why, and whether its port speaks another protocol."""

from __future__ import annotations

from paged_client.types import PagedError

_REFUSED = ("Connection refused", "ConnectionRefusedError")
_UNKNOWN_HOST = ("errors resolving", "DNS resolution failed", "gaierror", "Name or service not known", "getaddrinfo")
# What a gRPC client reports if the other side speaks HTTP/1.1, and an HTTP client if it speaks HTTP/2. An HTTP port of
# tritonserver closes a gRPC connection at once.
_HTTP_PORT = ("Failed parsing HTTP/2", "Trying to connect an http1.x server", "Socket closed")
_GRPC_PORT = ("BadStatusLine", "BadHttpMessage", "Expected HTTP/, RTSP/ or ICE/")


class UnreachableError(PagedError):
    """The server cannot be reached. `hint` says what to do about it; it is empty if that is not known."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__("UNAVAILABLE", message)
        self.hint = hint


def unreachable(url: str, protocol: str, reason: str) -> UnreachableError:
    """Return the error of a failed connection.

    Args:
        url: the address, as the user gave it.
        protocol: "grpc" or "http".
        reason: the message of the transport's library.
    """
    if _any(_REFUSED, reason):
        hint = "start a server with `paged serve MODEL`, or pass the address of a running one with --url HOST:PORT"
        return UnreachableError(f"nothing listens at {url}: connection refused", hint)
    if _any(_UNKNOWN_HOST, reason):
        return UnreachableError(f"the host name of {url} is not known", "check --url")
    if protocol == "grpc" and _any(_HTTP_PORT, reason):
        hint = (
            "pass the server's gRPC address with --url (Triton's default port is 8001); if this is Triton's HTTP port"
            " (8000), add --protocol http"
        )
        return UnreachableError(f"{url} does not speak gRPC, but probably HTTP", hint)
    if protocol == "http" and _any(_GRPC_PORT, reason):
        hint = "pass the server's HTTP address with --url (Triton's default port is 8000), or use --protocol grpc"
        return UnreachableError(f"{url} does not speak HTTP, but probably gRPC", hint)
    return UnreachableError(f"{url}: {reason}")


def _any(texts: tuple[str, ...], reason: str) -> bool:
    return any(text in reason for text in texts)
