"""Kills a process with many clients, and records the history of these clients until then."""

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


async def kill_clients(server: Server, plans: Sequence[Plan], history: History, rng: random.Random) -> None:
    """Send SIGKILL after a random number of history lines.

    At that time some clients wait for their first token, others are reading, and others are about to finish.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.stress.client_process", str(server.http_port), server.grpc_url,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin and process.stdout
    process.stdin.write("".join(json.dumps(to_json(plan)) + "\n" for plan in plans).encode())
    process.stdin.close()
    last = rng.randint(len(plans), 4 * len(plans))  # the first lines are the invocations
    open_ones = set()
    for number in itertools.count(1):
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            break
        event = json.loads(line)
        history.put(event)
        if event["kind"] == "invoke":
            open_ones.add(event["id"])
        elif event["kind"] == "terminal":
            open_ones.discard(event["id"])
        if number == last:
            process.kill()
    await process.wait()
    for id in sorted(open_ones):
        history.add("terminal", id=id, how="left", fault="kill")
