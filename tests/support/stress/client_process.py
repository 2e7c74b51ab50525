"""A process full of clients, for somebody to kill: plans come at its standard input, history goes to its output. What
is named after the server's addresses each of them asks for, too."""

import asyncio
import json
import sys

from tests.support.stress.asks import ALWAYS
from tests.support.stress.clients import Clients
from tests.support.stress.history import History
from tests.support.stress.plans import from_json


async def main(http_port: int, grpc_url: str, *more: str) -> None:
    ALWAYS.update(dict.fromkeys(more, True))
    plans = [from_json(json.loads(line)) for line in sys.stdin]
    clients = Clients(http_port, grpc_url, History(sys.stdout))
    await clients.play_all(plans, open=len(plans))
    await clients.close()


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:]))
