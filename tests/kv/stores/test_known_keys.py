"""The keys that a remote store is known to have."""

from paged_backend.kv.stores import remote as known_keys
from paged_backend.kv.stores.remote import KnownKeys

KEYS = [b"a", b"b", b"c", b"d"]


def test_keys_above_the_budget_are_removed_least_recently_used_first():
    keys = KnownKeys(budget=30, ttl=1000)
    for key in KEYS[:3]:
        assert keys.evictable(10) == []
        keys.add(key, 10)
    keys.add(b"a")  # has been read
    assert keys.evictable(15) == [b"b", b"c"]
    assert keys.nbytes == 30
    keys.remove(b"b", b"c")
    assert [key in keys for key in KEYS[:3]] == [True, False, False]
    assert keys.nbytes == 10


def test_values_of_other_servers_do_not_count_and_are_not_deleted():
    keys = KnownKeys(budget=10, ttl=1000)
    keys.add(b"a")
    keys.add(b"b", 10)
    keys.add(b"c")
    assert keys.nbytes == 10
    assert keys.evictable(10) == [b"b"]
    assert [key in keys for key in KEYS[:3]] == [False, True, True]


def test_rewritten_value_counts_once():
    keys = KnownKeys(budget=100, ttl=1000)
    keys.add(b"a", 10)
    keys.add(b"a", 20)
    assert keys.nbytes == 20
    keys.remove(b"a")
    keys.remove(b"a")
    assert keys.nbytes == 0
    assert b"a" not in keys


def test_expired_keys_are_not_known_but_count():
    keys = KnownKeys(budget=100, ttl=1000)
    keys.add(b"a", 10)
    keys.expire()
    assert b"a" not in keys
    assert keys.nbytes == 10
    keys.add(b"a")
    assert b"a" in keys
    assert keys.nbytes == 10
    short = KnownKeys(budget=100, ttl=0)
    short.add(b"a", 10)
    assert b"a" not in short


def test_number_of_keys_is_bounded(monkeypatch):
    monkeypatch.setattr(known_keys, "MAX_KNOWN_KEYS", 2)
    keys = KnownKeys(budget=100, ttl=1000)
    for key, removed in zip(KEYS, ([], [], [b"a"], [b"b"]), strict=True):
        assert keys.evictable(1) == removed
        keys.remove(*removed)
        keys.add(key, 1)
    keys.add(b"e")
    assert [key for key in (*KEYS, b"e") if key in keys] == [b"c", b"d"]
    keys.add(b"c")
    assert keys.evictable(1) == [b"d"]
