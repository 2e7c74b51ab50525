"""Checks server addresses and headers before libraries do, which take many invalid ones for host names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

_HOST_AND_PORT = re.compile(r"(?P<host>[^\s:/@\[\]]+|\[[^\s/@\[\]]+\]):(?P<port>[0-9]{1,5})")
_GRPC_SCHEME = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):\S")
_NUM_PORTS = 65536
_HEADER_NAME, _HEADER_VALUE = re.compile(r"[A-Za-z0-9_.-]+"), re.compile(r"[\x20-\x7e]*")
_FORM = "HOST:PORT, like localhost:{port}, with a port of 1..65535"


def host_of(url: str) -> str | None:
    """Return HOST of a valid HOST:PORT, with the brackets of an IPv6 address; None for anything else."""
    match = _HOST_AND_PORT.fullmatch(url)
    return match["host"] if match and 0 < int(match["port"]) < _NUM_PORTS else None


def grpc_target(url: str) -> str:
    """Return `url`: HOST:PORT, or a target with one of gRPC's schemes, such as unix:PATH.

    Raises ValueError for anything else, of which gRPC would take a part for the host name.
    """
    if "//" in url or not (host_of(url) or _GRPC_SCHEME.match(url)):
        raise ValueError(f"url={url!r}: gRPC takes {_FORM.format(port=8001)}")
    return url


def http_base(url: str) -> str:
    """Return `url` with its scheme: HOST:PORT, or http://HOST or https://HOST with or without a port and a path.

    Raises ValueError for anything else.
    """
    if "//" not in url:
        valid, base = host_of(url.partition("/")[0]) is not None, f"http://{url}"
    else:
        parts = urlsplit(url)
        has_port = not re.fullmatch(r"[^\[\]:]+|\[[^\[\]]+\]", parts.netloc)
        valid, base = parts.scheme in ("http", "https") and (not has_port or host_of(parts.netloc) is not None), url
    if not valid:
        form = _FORM.format(port=8000)
        raise ValueError(f"url={url!r}: HTTP takes {form}, or http://HOST or https://HOST with or without a port")
    return base.rstrip("/")


def check_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers. Raises ValueError for a header that cannot be sent."""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"headers: the name {name!r} must be letters, digits and any of -_.")
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"headers: the value of {name!r} must be printable ASCII characters")
    return headers
