"""A process of clients that is killed, and what it has seen until then."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Sequence

from tests.support.stress.history import History
from tests.support.stress.plans import Plan, to_json
from tests.support.stress.server import Server


async def kill_clients(server: Server, plans: Sequence[Plan], history: History, dice: random.Random) -> None:
    """SIGKILL after a number of lines of its history: while its clients wait for their first token, read, or are at
    their end."""
    victim = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.stress.client_process", str(server.http_port), server.grpc_url,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert victim.stdin and victim.stdout
    victim.stdin.write("".join(json.dumps(to_json(plan)) + "\n" for plan in plans).encode())
    victim.stdin.close()
    last = dice.randint(len(plans), 4 * len(plans))  # the invocations come first
    open_ones = set()
    for number in itertools.count(1):
        line = await victim.stdout.readline()
        if not line.endswith(b"\n"):
            break
        event = json.loads(line)
        history.put(event)
        if event["kind"] == "invoke":
            open_ones.add(event["id"])
        elif event["kind"] == "terminal":
            open_ones.discard(event["id"])
        if number == last:
            victim.kill()
    await victim.wait()
    for id in sorted(open_ones):
        history.add("terminal", id=id, how="left", way="kill")
