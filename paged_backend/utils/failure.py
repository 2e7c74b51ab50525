"""Why an engine answers no more requests until its model is loaded again: the logger `paged_llm.failure`.

`paged serve` reads these lines, and then ends the server or starts it again.
"""

from __future__ import annotations

import logging
import re

_log = logging.getLogger("paged_llm.failure")
LAST_WORDS_SECONDS = 0.5  # after a line, for the errors of open requests to reach their clients
LINE = re.compile(r" ERROR paged_llm\.failure: (.*)")


def report(reason: str) -> None:
    """Log why the engine has failed, on one line. Open requests get their errors within LAST_WORDS_SECONDS."""
    _log.error(" ".join(reason.split()))
