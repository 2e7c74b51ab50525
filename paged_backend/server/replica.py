"""A replica of the engine in a process of its own, which runs requests of the process that started it.

The first line on its standard output is JSON: {"socket": name, "stats": statistics} once it is ready, or
{"error": reason}. It ends when its standard input is closed.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.utils.machine import find_python


class ReplicaStart(NamedTuple):
    """The arguments of a replica's process."""

    number: int  # 1 and up; the process that starts the replicas is number 0
    model: str  # name of the model for clients
    version: str
    listing: str | None  # file that lists LoRA adapters
    options: Mapping[str, object]


def start_replica(start: ReplicaStart, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start the process of a replica, which ends with this process. environment: changes to that of this process.
    Raises OSError."""
    return subprocess.Popen(
        [find_python(), "-m", "paged_backend.server.replica", json.dumps(start)],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C then reaches the server only, which drains open streams
    )


def options_of(config: EngineConfig) -> dict[str, object]:
    """Return the options of a replica: those of the model, without what the first process does for all of them."""
    own = {"data_parallel_size": 1, "disable_log_stats": True, "otlp_traces_endpoint": None}
    return asdict(config) | own


def main(text: str) -> None:
    """Serve until the standard input is closed."""
    faulthandler.enable()
    start = ReplicaStart(*json.loads(text))
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s %(name)s: replica {start.number}: %(message)s"
    )
    # Imported late: they take seconds, in which an invalid argument would not be noticed.
    from paged_backend.server.service import Service

    labels = {"model": f"{start.model}/replica {start.number}", "version": start.version}
    try:
        config = EngineConfig.from_options(start.options)
        service = Service(
            config, None, labels, Path(start.listing) if start.listing else None, instance=f"replica {start.number}"
        )
        if service.socket_name is None:
            raise ConfigError("its local socket could not be opened")
    except ConfigError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        sys.exit(1)
    print(json.dumps({"socket": service.socket_name, "stats": asdict(service.stats)}), file=answers, flush=True)
    sys.stdin.read()
    service.stop()
    os._exit(0)  # the interpreter's own shutdown takes a second


if __name__ == "__main__":
    main(sys.argv[1])
