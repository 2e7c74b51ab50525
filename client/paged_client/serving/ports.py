"""Chooses free TCP ports."""

import contextlib
import socket


def choose_ports(**wanted: int) -> list[int]:
    """Return a free port for each name in `wanted`. 0 chooses any free port, another number requests that port.

    Raises ValueError that names every port that is in use, requested twice or out of range.
    """
    problems = []
    with contextlib.ExitStack() as stack:  # keeps all ports bound until all are chosen, so that they differ
        ports = []
        for name, port in wanted.items():
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
                listener.listen()  # reserves the port, which binding alone does not with SO_REUSEADDR
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) else "must be 0..65535"
                problems.append(f"{name}={port}: {reason}")
            ports.append(listener.getsockname()[1])
    if problems:
        raise ValueError("; ".join(problems))
    return ports
