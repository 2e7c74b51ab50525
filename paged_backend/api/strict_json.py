"""Parses JSON from clients. Rejects an object that has a key twice: Python's parser would take the last value, and a
proxy that checks a request may take the first.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from paged_backend.api.errors import cut


def parse(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if it is invalid, has a key twice, or is nested too deep."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)  # of thousands of names, in linear time
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the key {cut(json.dumps(twice))} is there twice")
    return found
