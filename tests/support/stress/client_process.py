"""A process with many clients, to be killed. It reads plans from standard input and writes the history to its output.

The arguments are the HTTP port and the gRPC address of the server, and further return flags for all requests.
"""

import asyncio
import json
import sys

from tests.support.stress.clients import Clients
from tests.support.stress.history import History
from tests.support.stress.plans import from_json
from tests.support.stress.requests import RETURN_FLAGS


async def main(http_port: int, grpc_url: str, *more: str) -> None:
    RETURN_FLAGS.update(dict.fromkeys(more, True))
    plans = [from_json(json.loads(line)) for line in sys.stdin]
    clients = Clients(http_port, grpc_url, History(sys.stdout))
    await clients.play_all(plans, open=len(plans))
    await clients.close()


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:]))
