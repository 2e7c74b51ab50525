"""Chooses free TCP ports."""

import contextlib
import random
import socket

# The system gives ports above these to outgoing connections, which may take a port before a server listens there.
FREE_PORTS = range(10_000, 32_000)
_random = random.SystemRandom()  # not the generator that tests seed, with which processes would choose the same ports


def choose_ports(**wanted: int) -> list[int]:
    """Return a free port for each name in `wanted`. 0 chooses any free port, another number requests that port.

    Raises ValueError that names every port that is in use, requested twice or out of range.
    """
    problems = []
    names: dict[int, list[str]] = {}
    for name, port in wanted.items():
        names.setdefault(port, []).append(name)
    for port, same in names.items():
        if port and len(same) > 1:
            problems.append(f"{'='.join(same)}={port}: must differ")
    if problems:
        raise ValueError("; ".join(problems))
    with contextlib.ExitStack() as stack:  # keeps all ports bound until all are chosen: they must differ
        ports = []
        for name, port in wanted.items():
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                _bind(listener, port)
                listener.listen()  # reserves the port, which binding alone does not with SO_REUSEADDR
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) else "must be 0..65535"
                problems.append(f"{name}={port}: {reason}")
            ports.append(listener.getsockname()[1])
    if problems:
        raise ValueError("; ".join(problems))
    return ports


def _bind(listener: socket.socket, port: int) -> None:
    """Bind to a port, or for 0 to a random free one."""
    choices = _random.sample(FREE_PORTS, 100) if port == 0 else []
    for choice in choices:
        with contextlib.suppress(OSError):
            return listener.bind(("", choice))
    listener.bind(("", port))
