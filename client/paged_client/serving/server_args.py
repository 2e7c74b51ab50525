"""Options of tritonserver that `paged serve` passes on: which are possible, and where the server then listens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from itertools import zip_longest
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
_ANY = ("", "0.0.0.0", "::", "[::]")
_OWN_OPTION = "it is an option of paged serve, before the --"
# Options that cannot be set, and why.
_RESERVED = {
    **dict.fromkeys(("--http-port", "--grpc-port", "--metrics-port"), _OWN_OPTION),
    **dict.fromkeys(("--model-repository", "--model-store", "--backend-directory"), "paged serve sets it"),
    "--model-control-mode": "paged serve relies on its default",
    "--allow-http": "paged serve asks over HTTP whether the model is ready",
    "--allow-metrics": "paged serve reads the metrics to know whether requests are open",
}
# Groups of endpoints that must not need a key.
_OPEN = {"--http-restricted-api": ("health", "paged serve asks over HTTP whether the model is ready")}


class Hosts(NamedTuple):
    """Where a client on this machine reaches a server."""

    http: str
    grpc: str
    metrics: str


def check_server_args(arguments: Sequence[str]) -> None:
    """Raise ValueError for an option of tritonserver that TritonServer sets itself or does not work with."""
    _check(arguments, _RESERVED, _OPEN)


def check_grpc_args(arguments: Sequence[str], users: str) -> None:
    """Raise ValueError for an option of tritonserver with which its gRPC port is closed to `users`, or needs a key.

    users: who calls it, like "the probes of --restart".
    """
    reserved = {
        "--allow-grpc": f"{users} use gRPC",
        **dict.fromkeys(("--grpc-use-ssl", "--grpc-use-ssl-mutual"), f"{users} use gRPC without TLS"),
    }
    _check(arguments, reserved, {"--grpc-restricted-protocol": ("inference", f"{users} have no key")})


def listening_at(host: str) -> list[str]:
    """Return the options with which a server listens at an IP address."""
    grpc, http = (f"[{host}]", f"ipv6:{host}") if ":" in host else (host, host)
    return [f"--http-address={http}", f"--grpc-address={grpc}", f"--metrics-address={http}"]


def open_addresses(arguments: Sequence[str]) -> list[str]:
    """Return where a server with these options listens for other machines: options and their values."""
    given = dict(_options(arguments))
    names = ("--http-address", "--grpc-address", "--metrics-address")
    return [f"{name}={given[name]}" for name in names if name in given and not _is_local(given[name])]


def listening_address(arguments: Sequence[str]) -> str:
    """Return the address at which a server with these options listens for HTTP: by default all IPv4 addresses."""
    return _bare(dict(_options(arguments)).get("--http-address", "")) or "0.0.0.0"


def hosts(arguments: Sequence[str]) -> Hosts:
    """Return where a server with these options is reached: by default at localhost."""
    given = dict(_options(arguments))  # of repeated options the last one counts
    http = given.get("--http-address", "")
    return Hosts(*map(reachable, (http, given.get("--grpc-address", ""), given.get("--metrics-address", http))))


def _check(arguments: Sequence[str], reserved: Mapping[str, str], restricted: Mapping[str, tuple[str, str]]) -> None:
    for name, value in _options(arguments):
        given = f"{name}={value}" if value else name
        if reason := reserved.get(name):
            raise ValueError(f"{given}: cannot be set; {reason}")
        group, reason = restricted.get(name, ("", ""))
        if group and group in value.partition(":")[0].split(","):
            raise ValueError(f"{given}: cannot restrict {group}; {reason}")


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each option: --name=value, or --name value."""
    for argument, after in zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            yield name, value if equals or after.startswith("--") else after


def _bare(address: str) -> str:
    return address.removeprefix("ipv6:").strip("[]")  # tritonserver's HTTP takes IPv6 addresses with this prefix


def _is_local(address: str) -> bool:
    with suppress(ValueError):
        return ip_address(_bare(address)).is_loopback
    return address == "localhost"


def reachable(address: str) -> str:
    """Return an address at which this machine reaches a server that listens at `address`."""
    address = address.removeprefix("ipv6:")
    if address in (*_ANY, LOOPBACK):
        return "localhost"
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
