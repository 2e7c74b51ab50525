"""Control requests: a map of the block pool, the list of adapters, and ending requests by id.

A control request is a single boolean input without a prompt. It is answered by one response.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.limits import InputLimits
from paged_backend.server.wire.parameters import read_parameters, read_sequence
from paged_backend.server.wire.values import Tensors, boolean

CONTROL_REQUESTS = ("pool_map", "adapters", "stop_request")  # names of the inputs


def read_control_request(
    tensors: Tensors,
    parameters: Mapping[str, Any],
    timeout_us: int = 0,
    sequence_id: int | str = 0,
    flags: int = 0,
    request_id: str = "",
    *,
    input_limits: InputLimits = InputLimits(),
) -> str | None:
    """Return which of CONTROL_REQUESTS this is; None for an ordinary request.

    Takes what `read_call` takes. Raises RequestError for any other input, which would have no effect.
    """
    name = next((name for name in CONTROL_REQUESTS if boolean(tensors, name)), None)
    if name is None:
        return None
    sampling, timeout_us = read_parameters(parameters, timeout_us)
    others = [*sorted(tensors.keys() - {name}), *sorted(sampling)]
    others += ["timeout"] * bool(timeout_us)
    others += ["sequence_id"] * bool(read_sequence(parameters, sequence_id, flags, input_limits))
    if others:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{others[0]}: has no effect with {name}; leave it out")
    return name


def write_pool_map(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {"pool_map": np.array([json.dumps(values).encode()], dtype=np.object_)}


def write_num_stopped(count: int) -> dict[str, np.ndarray]:
    return {"num_stopped": np.array([count], dtype=np.uint32)}


def write_adapters(values: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    return {"adapters": np.array([json.dumps(values).encode()], dtype=np.object_)}
