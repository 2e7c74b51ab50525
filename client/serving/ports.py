"""Chooses free TCP ports."""

import contextlib
import socket


def choose_ports(**wanted: int) -> list[int]:
    """Free ports for the names in `wanted`: 0 takes any, another number that one.

    Raises ValueError that names every port that is in use, asked for twice or out of range.
    """
    problems = []
    with contextlib.ExitStack() as held:  # all are held until all are chosen, so that they differ
        ports = []
        for name, port in wanted.items():
            holder = held.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind(("", port))
                holder.listen()  # with SO_REUSEADDR only a listener keeps others away
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) else "must be 0..65535"
                problems.append(f"{name}={port}: {reason}")
            ports.append(holder.getsockname()[1])
    if problems:
        raise ValueError("; ".join(problems))
    return ports
