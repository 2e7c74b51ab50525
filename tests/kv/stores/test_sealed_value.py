"""Authenticated values."""

import pytest

from paged_backend.kv.stores.remote import ForgedValue, Seal

SECRET, OTHER = b"sixteen bytes or more", b"another secret of this size"


def test_sealed_data_is_opened_with_the_same_secret_and_key():
    value = Seal(SECRET).close(b"key", b"data")
    assert Seal(SECRET).open(b"key", value) == b"data"
    assert len(value) == len(b"data") + Seal(SECRET).extra_bytes


@pytest.mark.parametrize(
    ("secret", "key", "change"),
    [
        (OTHER, b"key", lambda value: value),
        (SECRET, b"key2", lambda value: value),
        (SECRET, b"keyd", lambda value: value[:32] + value[33:]),  # the end of the key is not taken for data
        (SECRET, b"key", lambda value: value[:-1]),
        (SECRET, b"key", lambda value: value + b"\0"),
        (SECRET, b"key", lambda value: value[:-1] + b"A"),
        (SECRET, b"key", lambda value: b"\0" + value[1:]),
        (SECRET, b"key", lambda value: value[:31]),
        (SECRET, b"key", lambda value: b""),
    ],
)
def test_other_values_are_forged(secret, key, change):
    value = change(Seal(SECRET).close(b"key", b"data"))
    with pytest.raises(ForgedValue):
        Seal(secret).open(key, value)


def test_without_a_secret_a_value_is_the_data():
    assert Seal(None).close(b"key", b"data") == Seal(None).open(b"key", b"data") == b"data"
    assert Seal(None).extra_bytes == 0


def test_servers_with_different_secrets_have_different_names():
    names = {Seal(secret).name for secret in (SECRET, OTHER, None)}
    assert len(names) == 3
    assert Seal(SECRET).name == Seal(SECRET).name
    assert not any(SECRET.decode() in name for name in names)
