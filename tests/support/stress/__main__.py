"""Run stress tests by hand: `python -m tests.support.stress run --seed 3 kill=5000`, or check a history again."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from paged_client.serving.tritonserver import TritonServer
from tests.support import faults
from tests.support.stress import table
from tests.support.stress.campaign import StressTest
from tests.support.stress.checker import Verdict, check
from tests.support.stress.history import load
from tests.support.stress.server import OPTIONS, Log, save_printable, with_floor

TESTS = ("steady", "kill", "leave", "exhaust_pool", "hold", "soak")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.stress", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("check", help="read a history again")
    one.add_argument("file", type=Path)
    one = commands.add_parser("run", help="run stress tests with a server of their own")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("tests", nargs="+", metavar="TEST=SIZE", help=f"of {', '.join(TESTS)}, in this order")
    args = parser.parse_args()
    verdicts = [check(load(args.file))] if args.command == "check" else _run(args.seed, args.tests)
    print(f"{table.text()}\n\n{table.goals()}" if table.rows else verdicts[0])
    return int(any(verdict.problems for verdict in verdicts))


def _run(seed: int, tests: list[str]) -> list[Verdict]:
    """Run stress tests. The histories stay in the directory that is printed.

    A server whose gRPC streams were cancelled is killed instead of stopped: see StressTest.
    """
    directory = Path(tempfile.mkdtemp(prefix="stress-"))
    save_printable(directory / "model")
    repository, log = faults.inject_into_repository(with_floor(directory / "repository"), {"log_drops": 1}), Log()
    with TritonServer(directory / "model", OPTIONS, repository=repository, echo=log) as server:
        selected = [one.partition("=") for one in tests]
        cancels = any(name in ("hold", "leave") for name, _, _ in selected)
        stress = StressTest(server, directory, seed, cancels=cancels, log=log)
        verdicts = [getattr(stress, name)(int(size)) for name, _, size in selected if name in TESTS]
        if not cancels:
            return [*verdicts, stress.stop()]
        server.kill()
        return verdicts


if __name__ == "__main__":
    sys.exit(main())
