"""The address of a Redis server, `redis://user:password@host:port/database` or `rediss://` with TLS."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

SCHEMES = {"redis": False, "rediss": True}  # scheme: whether it is TLS
DEFAULT_PORT = 6379
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")  # query parameters, with the names that redis-py uses
PROBLEM = "must be a URL like redis://host:6379/0, or rediss://host:6379/0 for TLS"


@dataclass(frozen=True)
class RedisAddress:
    """A Redis server, and how to log in. The password is not part of its representation."""

    host: str
    port: int = DEFAULT_PORT
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_files: tuple[tuple[str, str], ...] = ()  # (name in TLS_FILES, path)

    def __str__(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.database}"

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Parse a URL. Raises ValueError, whose message contains nothing of the URL but names of query parameters."""
        try:
            parts = urlsplit(url)
            port, query = parts.port or DEFAULT_PORT, parse_qsl(parts.query, strict_parsing=bool(parts.query))
        except ValueError:
            raise ValueError(PROBLEM) from None
        database = re.fullmatch(r"/?([0-9]{0,9})", parts.path)
        if parts.scheme not in SCHEMES or not parts.hostname or not database or parts.fragment:
            raise ValueError(PROBLEM)
        tls = SCHEMES[parts.scheme]
        for name, _ in query:
            if name not in TLS_FILES:
                raise ValueError(f"the query parameter {name!r} is unknown; must be one of {', '.join(TLS_FILES)}")
            if not tls:
                raise ValueError(f"the query parameter {name!r} has no effect without TLS; use rediss://")
        login = [unquote(value) if value else None for value in (parts.username, parts.password)]
        return cls(parts.hostname, port, int(database[1] or 0), login[0], login[1], tls, tuple(query))


def redis_url(value: Any) -> str:
    """Parse an option that is the URL of a Redis server. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(PROBLEM)
    RedisAddress.parse(value)
    return value
