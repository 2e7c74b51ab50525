"""Limits of the gateway. The command line imports this module, so it does not import the web framework."""

from __future__ import annotations

from dataclasses import dataclass

from paged_client.openai.errors import ApiError

SMALL_BYTES = 64 << 10  # size of a body that only `max_open_requests` limits: others' large bodies do not keep it out


@dataclass(frozen=True)
class GatewayLimits:
    """Limits of requests. Each field is an option of `paged openai` with the same name."""

    max_open_requests: int = 4096  # concurrent requests of all clients
    max_request_bytes: int = 10 << 20  # size of a body
    max_open_bytes: int = 512 << 20  # bytes of the bodies of all open requests, without the first SMALL_BYTES of each
    max_prompts: int = 128  # prompts of a completion request
    max_inputs: int = 2048  # inputs of a request for embeddings, classes, scores or a ranking
    body_timeout: float = 30.0  # seconds within which the headers of a request, and then its body, must be received

    def check(self, option: str, field: str, count: int, what: str) -> None:
        """Raises ApiError if `count` exceeds the option."""
        limit = getattr(self, option)
        if count > limit:
            raise ApiError(400, f"{field}: has {count} {what}; must be at most {limit} ({flag(option)})", param=field)


def flag(option: str) -> str:
    """Return the command-line flag of an option."""
    return "--" + option.replace("_", "-")
