"""Why an engine answers no more requests until its model is loaded again: the logger `paged_llm.failure`.

`paged serve` reads these lines, and then ends the server or starts it again. The log may have text of requests, such as
their ids. So `paged serve` gives its server a mark that no client knows, and believes only lines that have it.
"""

from __future__ import annotations

import logging
import os
import re

MARK = "PAGED_FAILURE_MARK"  # environment variable of the server
_log = logging.getLogger("paged_llm.failure")
OTHERS_GO_ON = "; the other engines finish their requests"  # the end of a reason after which some requests can end
LAST_WORDS_SECONDS = 0.5  # after a line, for the errors of open requests to reach their clients


def report(reason: str) -> None:
    """Log why the engine has failed, on one line. Open requests get their errors within LAST_WORDS_SECONDS."""
    _log.error("%s", f"{_begin(os.environ.get(MARK))}{' '.join(reason.split())}")


def reported(line: str, mark: str) -> str | None:
    """Return the reason that a line of the log reports; None if it is another line, or does not have the mark."""
    match = re.search(rf" ERROR paged_llm\.failure: {re.escape(_begin(mark))}(.*)", line)
    return match and match[1]


def _begin(mark: str | None) -> str:
    return f"[{mark}] " if mark else ""
