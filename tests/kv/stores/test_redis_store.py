"""A store that answers what it likes."""

import socket
import sys
import threading

import pytest

from paged_backend.api.errors import ConfigError
from paged_backend.api.redis_address import RedisAddress
from paged_backend.kv.stores.remote import MAX_REASON_CHARS, RedisClient, StoreError


def test_errors_of_the_store_are_short_and_printable():
    """They are logged."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            accepted, _ = listening.accept()
            with accepted:
                accepted.sendall(b"-ERR \x1b[31mred" + b" long" * 100_000 + b"\r\n")
                while accepted.recv(4096):  # until the other side closes: unread bytes would reset the connection
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        store = RedisClient(RedisAddress.parse(f"redis://127.0.0.1:{listening.getsockname()[1]}"), None, 60.0)
        with pytest.raises(StoreError, match=r"ResponseError: .*\[31mred long .*\.\.\.$") as caught:
            store.connect()
        store.close()
        thread.join()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2 * MAX_REASON_CHARS


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"remote_cache_url: a package is missing .*paged-llm-triton\[remote\]"):
        RedisClient(RedisAddress.parse("redis://localhost"), None, 1.0)
