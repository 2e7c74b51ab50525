"""`paged sleep` and `paged wake`: release the memory of a model on this machine, and restore it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from paged_backend.api.sizes import GIB
from paged_client.commands.arguments import seconds
from paged_client.commands.local_server import find_sockets, run_command


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sleeping = commands.add_parser(
        "sleep", help="release the memory of a running model on this machine, until paged wake"
    )
    waking = commands.add_parser("wake", help="restore the memory of a model that paged sleep has released")
    for parser in (sleeping, waking):
        parser.add_argument("--model", default="paged_llm", help="name of the model (default: paged_llm)")
        parser.add_argument(
            "--url", metavar="HOST:PORT", help="gRPC or HTTP address of the server, if several here serve the model"
        )
    sleeping.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="time for open requests to end; after it nothing is changed (default: 60)",
    )
    sleeping.set_defaults(run=sleep)
    waking.set_defaults(run=wake)


def sleep(args: argparse.Namespace) -> int:
    for name in find_sockets(args.model, args.url):
        result, reported = {}, 0
        for frame in run_command(name, {"sleep": args.timeout}):
            if (count := frame.get("open")) and count != reported:
                print(f"waiting for {count} open {'requests' if count > 1 else 'request'}", file=sys.stderr)
                reported = count
            if "sleep" in frame:
                result = frame["sleep"]
                break
        print(_describe_sleep(args.model, result))
    return 0


def wake(args: argparse.Namespace) -> int:
    for name in find_sockets(args.model, args.url):
        result = next(run_command(name, {"wake": True}))["wake"]
        print(_describe_wake(args.model, result))
    return 0


def _describe_sleep(model: str, result: dict[str, Any]) -> str:
    if not result["changed"]:
        return f"{model} is asleep already"
    memory = result["bytes"]
    freed = f"{model} is asleep: freed {_gib(sum(memory.values()))} in {result['seconds']:.2f} s"
    if not memory["weights"]:
        return f"{freed} (KV cache; the weights stay in memory, as the model runs on a CPU)"
    return (
        f"{freed} (KV cache {_gib(memory['pool'])}, CUDA graphs {_gib(memory['graphs'])};"
        f" weights {_gib(memory['weights'])}, moved to host memory)"
    )


def _describe_wake(model: str, result: dict[str, Any]) -> str:
    if not result["changed"]:
        return f"{model} is awake already"
    return f"{model} is awake: restored {_gib(sum(result['bytes'].values()))} in {result['seconds']:.2f} s"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
