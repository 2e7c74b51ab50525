"""A process with many clients, to be killed. It reads plans from standard input and writes the history to its output.

The arguments are the HTTP port and the gRPC address of the server, and further return flags for all requests. With
--stop, the process stops (SIGSTOP) as soon as all requests have tokens or have ended.
"""

import asyncio
import json
import os
import signal
import sys
from typing import TextIO

from tests.support.stress.clients import Clients
from tests.support.stress.history import Event, History
from tests.support.stress.plans import from_json
from tests.support.stress.requests import RETURN_FLAGS


class StoppingHistory(History):
    """A history whose writer stops its own process when the first events of all requests are written."""

    def __init__(self, file: TextIO, requests: int) -> None:
        super().__init__(file)
        self._requests, self._has_stopped = requests, False

    def put(self, event: Event) -> None:
        super().put(event)
        if not self._has_stopped and len(self.started | self.ended) == self._requests:
            self._has_stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)


async def main(http_port: int, grpc_url: str, *more: str) -> None:
    RETURN_FLAGS.update(dict.fromkeys((name for name in more if name != "--stop"), True))
    plans = [from_json(json.loads(line)) for line in sys.stdin]
    history = StoppingHistory(sys.stdout, len(plans)) if "--stop" in more else History(sys.stdout)
    clients = Clients(http_port, grpc_url, history)
    await clients.play_all(plans, open=len(plans))
    await clients.close()


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:]))
