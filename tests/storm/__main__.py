"""Storms by hand: `python -m tests.storm run --seed 3 kill=5000 soak=180`, or `python -m tests.storm check FILE`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from paged_backend.serving.tritonserver import TritonServer
from tests.storm import table
from tests.storm.checker import Verdict, check
from tests.storm.history import load
from tests.storm.server import OPTIONS, engine_alone, save_printable
from tests.storm.storm import Storm

STORMS = ("calm", "kill", "dry", "hold", "soak")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("check", help="read a history again")
    one.add_argument("file", type=Path)
    one = commands.add_parser("run", help="storms over a server of their own")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("storms", nargs="+", metavar="STORM=SIZE", help=f"of {', '.join(STORMS)}, in this order")
    asked = parser.parse_args()
    verdicts = [check(load(asked.file))] if asked.command == "check" else _run(asked.seed, asked.storms)
    print(table.text() or verdicts[0])
    return int(any(verdict.problems for verdict in verdicts))


def _run(seed: int, storms: list[str]) -> list[Verdict]:
    """The histories stay where they are printed to be."""
    directory = Path(tempfile.mkdtemp(prefix="storm-"))
    save_printable(directory / "model")
    with TritonServer(directory / "model", OPTIONS, repository=engine_alone(directory / "repository")) as server:
        storm = Storm(server, directory, seed)
        asked = [one.partition("=") for one in storms]
        return [*(getattr(storm, name)(int(size)) for name, _, size in asked if name in STORMS), storm.stop()]


if __name__ == "__main__":
    sys.exit(main())
