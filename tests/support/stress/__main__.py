"""Stress runs by hand: `python -m tests.support.stress run --seed 3 kill=5000 soak=300000`, or `... check FILE`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from client.serving.tritonserver import TritonServer
from tests.support import faults
from tests.support.stress import table
from tests.support.stress.campaign import StressTest
from tests.support.stress.checker import Verdict, check
from tests.support.stress.history import load
from tests.support.stress.server import OPTIONS, Log, save_printable, with_floor

STORMS = ("calm", "kill", "leave", "dry", "hold", "soak")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.stress", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("check", help="read a history again")
    one.add_argument("file", type=Path)
    one = commands.add_parser("run", help="storms over a server of their own")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("storms", nargs="+", metavar="STORM=SIZE", help=f"of {', '.join(STORMS)}, in this order")
    asked = parser.parse_args()
    verdicts = [check(load(asked.file))] if asked.command == "check" else _run(asked.seed, asked.storms)
    print(f"{table.text()}\n\n{table.goals()}" if table.rows else verdicts[0])
    return int(any(verdict.problems for verdict in verdicts))


def _run(seed: int, storms: list[str]) -> list[Verdict]:
    """The histories stay where they are printed to be. A server whose gRPC streams were cancelled is not asked to stop:
    see Storm."""
    directory = Path(tempfile.mkdtemp(prefix="storm-"))
    save_printable(directory / "model")
    repository, log = faults.inject_into_repository(with_floor(directory / "repository"), {"log_drops": 1}), Log()
    with TritonServer(directory / "model", OPTIONS, repository=repository, echo=log) as server:
        asked = [one.partition("=") for one in storms]
        cancels = any(name in ("hold", "leave") for name, _, _ in asked)
        storm = StressTest(server, directory, seed, cancels=cancels, log=log)
        verdicts = [getattr(storm, name)(int(size)) for name, _, size in asked if name in STORMS]
        if not cancels:
            return [*verdicts, storm.stop()]
        server.kill()
        return verdicts


if __name__ == "__main__":
    sys.exit(main())
