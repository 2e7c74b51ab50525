"""The number of restarts by reason, which `paged serve --restart` passes on to the model of the new server.

The model reports them as the metric `paged_restarts_total`, because the server's metrics begin anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

VARIABLE = "PAGED_RESTARTS"  # environment variable with a JSON object: reason -> number
# exited: tritonserver has ended. stub_died: the engine's process has ended. not_responding: no token within the time
# limit of a probe. engine_failed: the engine reports that it has failed, or probes end with an error. start_failed: the
# new server did not become ready.
REASONS = ("exited", "stub_died", "not_responding", "engine_failed", "start_failed")


def write(counts: Mapping[str, int]) -> dict[str, str]:
    """Return the environment variable for the next server."""
    return {VARIABLE: json.dumps(dict(counts))}


def read() -> dict[str, int]:
    """Return the restarts before this process, by reason. Ignores a variable that is not valid."""
    try:
        counts = json.loads(os.environ.get(VARIABLE, "{}"))
        return {reason: int(counts.get(reason, 0)) for reason in REASONS}
    except (ValueError, TypeError, AttributeError):
        return dict.fromkeys(REASONS, 0)
