"""Request parameters: sampling parameters, the timeout, the sequence and the request id.

Over gRPC a client sets them on the request; over the generate endpoints, and on some servers also the request's own
timeout and ids, they are fields of the JSON body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_backend.api.errors import invalid_argument
from paged_backend.api.limits import InputLimits
from paged_backend.api.parameter_names import suggestion
from paged_backend.api.sampling_params import PARAMETER_NAMES
from paged_backend.server.wire.call import SequenceControl

SEQUENCE_START, SEQUENCE_END = 1, 2  # bits of a Triton request's flags
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
TRACE_CONTEXT = ("traceparent", "tracestate")
_PARAMETERS = PARAMETER_NAMES.union(_SEQUENCE, ("timeout", "id"))
# HTTP headers without a dash in their names. A server with header forwarding passes headers on as parameters.
_HEADERS = frozenset(
    "accept authorization baggage connection cookie forwarded from host origin referer te traceparent tracestate"
    " upgrade via".split()
)


def read_parameters(parameters: Mapping[str, Any], timeout_us: int) -> tuple[dict[str, Any], int]:
    """Return the sampling parameters among the request's, and its timeout in microseconds.

    Forwarded HTTP headers are ignored. Raises RequestError for any other unknown name, and for a name that resembles a
    known one, even if it may be a header.
    """
    sampling: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in PARAMETER_NAMES:
            sampling[name] = value
        elif name == "timeout":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise invalid_argument(name, value, "must be a whole number of microseconds, at least 0")
            timeout_us = value
        elif name in _SEQUENCE or name == "id":
            continue  # see read_sequence and read_request_id
        elif hint := suggestion(name.lower().replace("-", "_"), _PARAMETERS, cutoff=0.8):
            raise invalid_argument(name, value, f"unknown parameter; {hint}")
        elif "-" not in name and name.lower() not in _HEADERS and not name.startswith("triton_"):
            raise invalid_argument(name, value, f"unknown parameter; known are {', '.join(sorted(_PARAMETERS))}")
    return sampling, timeout_us


def read_sequence(
    parameters: Mapping[str, Any], sequence_id: int | str, flags: int, input_limits: InputLimits
) -> SequenceControl | None:
    """Return the session that the request belongs to, or None. A parameter takes precedence over `sequence_id`."""
    name = parameters.get("sequence_id", sequence_id)
    if isinstance(name, bool) or not isinstance(name, int | str) or (isinstance(name, int) and name < 0):
        raise invalid_argument(
            "sequence_id", name, "must be a whole number above 0 or a string; over HTTP at most 2**63 - 1"
        )
    if parameters.get("sequence_id") == "":
        raise invalid_argument("sequence_id", "", "must not be empty, or begin with a NUL, at which Triton cuts it")
    if isinstance(name, str):
        num_bytes = len(name.encode(errors="replace"))
        input_limits.check("max_sequence_id_bytes", "sequence_id", num_bytes, "bytes")
    name = name or sequence_id  # 0 and "" mean no sequence
    given = []
    for field, bit in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
        value = parameters.get(field, False)
        if not isinstance(value, bool):
            raise invalid_argument(field, value, "must be true or false")
        given.append(value or bool(flags & bit))
        if given[-1] and not name:
            raise invalid_argument(field, True, "needs a sequence_id")
    return SequenceControl(name, *given) if name else None


def read_trace_context(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers `traceparent` and `tracestate` of the W3C trace context. Like HTTP servers, which ignore an
    invalid header, do not check them."""
    values = {name.lower(): value for name, value in parameters.items()}
    return {name: values[name] for name in TRACE_CONTEXT if isinstance(values.get(name), str)}


def read_request_id(parameters: Mapping[str, Any], request_id: str, input_limits: InputLimits) -> str:
    """Return the request id, or "". Some servers pass it on as the parameter `id`, which takes precedence."""
    name = parameters.get("id", request_id)
    if not isinstance(name, str):
        raise invalid_argument("id", name, "must be a string")
    input_limits.check("max_request_id_bytes", "id", len(name.encode(errors="replace")), "bytes")
    return name or request_id
