"""The option `kv_events_config`: publishing changes of the prefix cache, as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paged_backend.api.options import flag, integer, one_of, option, text, validate


def _any_text(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be a string"


@dataclass(frozen=True)
class KvEventsConfig:
    """The fields of `kv_events_config`, which are vLLM's."""

    enable_kv_cache_events: bool = option(flag, "Publish an event for every block that is cached or evicted.", False)
    publisher: str = option(one_of("zmq", "null"), "`zmq`, or `null`: publish nothing.", "zmq")
    endpoint: str = option(
        text,
        "ZeroMQ endpoint that the PUB socket binds. Events have the tokens of prompts, so only this machine can read"
        " them by default; vLLM's default is `tcp://*:5557`.",
        "tcp://127.0.0.1:5557",
    )
    replay_endpoint: str | None = option(
        text, "ZeroMQ endpoint of the ROUTER socket that sends past batches again. `null`: none.", None, optional=True
    )
    buffer_steps: int = option(integer(1), "Batches kept for `replay_endpoint`.", 10_000)
    hwm: int = option(
        integer(0), "Batches queued for a slow subscriber, after which it loses some. 0: no limit.", 100_000
    )
    max_queue_size: int = option(
        integer(1), "Batches queued before they are sent. Further ones are dropped, with a warning in the log.", 100_000
    )
    topic: str = option(_any_text, "Topic of the messages.", "")

    def __post_init__(self) -> None:
        validate(self, "kv_events_config.")

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"
