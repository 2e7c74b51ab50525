"""`paged worker`: run the ranks of a model on a machine other than the server's."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from paged_backend.api.options import host
from paged_backend.utils.machine import find_python
from paged_client.session import UsageError

FLAGS = {"MASTER_ADDR": "--master-addr", "MASTER_PORT": "--master-port", "NODE_RANK": "--node-rank"}


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "worker",
        help="run the ranks of a model on a machine other than the server's",
        description="Run this machine's ranks of a model that several machines share. Waits for the server, whose"
        " options apply here as well, and after its end for the next one. The defaults are those of torchrun:"
        " MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment.",
    )
    add = parser.add_argument
    add("--master-addr", metavar="ADDRESS", help="address of the server's machine, as in its option master_addr")
    add("--master-port", type=int, metavar="PORT", help="the server's option master_port (default: 29500)")
    add("--node-rank", type=int, metavar="N", help="number of this machine: 1 to nnodes - 1")
    add("--model", metavar="DIR", help="directory of the model on this machine (default: that on the server's)")
    parser.set_defaults(run=worker)


def worker(args: argparse.Namespace) -> int:
    """Replace this process by the worker's, which has the environment of torchrun."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    given = {"MASTER_ADDR": args.master_addr, "MASTER_PORT": args.master_port, "NODE_RANK": args.node_rank}
    environment |= {name: str(value) for name, value in given.items() if value is not None}
    check(environment)
    command = [find_python(), "-m", "paged_backend.engine.worker_node", *([args.model] if args.model else [])]
    os.execve(command[0], command, environment)


def check(environment: Mapping[str, str]) -> None:
    """Raise UsageError if an argument is missing or invalid."""
    for name in ("MASTER_ADDR", "NODE_RANK"):
        if not environment.get(name):
            raise UsageError(f"{FLAGS[name]} is missing, and so is {name} in the environment")
    try:
        host(environment["MASTER_ADDR"])
    except ValueError as error:
        address = f"{FLAGS['MASTER_ADDR']} (MASTER_ADDR) {environment['MASTER_ADDR']}"
        raise UsageError(f"{address}: {error}") from None
    for name, lowest, highest in (("NODE_RANK", 1, 63), ("MASTER_PORT", 1, 65535)):
        value = environment.get(name, str(lowest))
        if not value.isdecimal() or not lowest <= int(value) <= highest:
            raise UsageError(f"{FLAGS[name]} ({name}) {value}: must be a number from {lowest} to {highest}")
