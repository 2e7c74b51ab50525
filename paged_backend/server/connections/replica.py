"""A replica of the engine in a process of its own, which runs requests of the process that started it.

The first line of its standard input is JSON. It is no argument, because the options may have a password:

    number    1 and up; the process that starts the replicas is number 0
    model     name of the model for clients, and its `version`
    listing   file that lists LoRA adapters, or null
    options   of the engine

The first line on its standard output is JSON: {"socket": name, "stats": statistics} once it is ready, or
{"error": reason}. It ends when its standard input is closed.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
from pathlib import Path

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.utils import lean_import


def main(text: str) -> None:
    """Serve until the standard input is closed."""
    faulthandler.enable()
    start = json.loads(text)
    name, listing = f"replica {start['number']}", start["listing"]
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s %(name)s: {name}: %(message)s")
    labels = {"model": f"{start['model']}/{name}", "version": start["version"]}
    try:
        config = EngineConfig.from_options(start["options"])
        if config.num_ranks == 1:
            lean_import.import_transformers()
        from paged_backend.server.service import Service

        service = Service(config, None, labels, Path(listing) if listing else None, is_replica=True)
        if service.socket_name is None:
            raise ConfigError("its local socket could not be opened")
    except ConfigError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        sys.exit(1)
    print(json.dumps({"socket": service.socket_name, "stats": vars(service.stats)}), file=answers, flush=True)
    sys.stdin.read()
    service.stop()
    os._exit(0)  # the interpreter's own shutdown takes a second


if __name__ == "__main__":
    main(sys.stdin.readline())
