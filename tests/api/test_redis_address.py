"""URLs of Redis servers."""

import re

import pytest

from paged_backend.api.redis_address import RedisAddress, redis_url


def test_parts_of_a_url():
    assert RedisAddress.parse("redis://host") == RedisAddress("host", 6379, 0)
    assert RedisAddress.parse("redis://host:7000/3") == RedisAddress("host", 7000, 3)
    assert RedisAddress.parse("redis://[::1]:7000/") == RedisAddress("::1", 7000)
    files = (("ssl_ca_certs", "/a b.crt"), ("ssl_keyfile", "/k"))
    assert RedisAddress.parse("rediss://user:p%40ss%2F@host/1?ssl_ca_certs=/a%20b.crt&ssl_keyfile=/k") == RedisAddress(
        "host", 6379, 1, "user", "p@ss/", True, files
    )
    assert RedisAddress.parse("redis://:secret@host").password == "secret"


def test_text_and_representation_have_no_password():
    address = RedisAddress.parse("rediss://user:secret@host:7000/3")
    assert str(address) == "rediss://host:7000/3"
    assert "secret" not in repr(address)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (7, "must be a URL like redis://host:6379/0"),
        ("", "must be a URL like"),
        ("host:6379", "must be a URL like"),
        ("http://host", "must be a URL like"),
        ("redis://", "must be a URL like"),
        ("redis://host:port", "must be a URL like"),
        ("redis://host:70000", "must be a URL like"),
        ("redis://host/first", "must be a URL like"),
        ("redis://host/0/1", "must be a URL like"),
        ("redis://host#part", "must be a URL like"),
        ("rediss://host?ssl_ca_certs", "must be a URL like"),
        ("rediss://host?ssl_cert_reqs=none", "the query parameter 'ssl_cert_reqs' is unknown; must be one of ssl_ca_"),
        ("redis://host?ssl_ca_certs=/a", "the query parameter 'ssl_ca_certs' has no effect without TLS; use rediss://"),
    ],
)
def test_invalid_urls_are_rejected(url, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        redis_url(url)


def test_a_valid_url_is_the_value_of_an_option():
    url = "rediss://user:secret@host:7000/3"
    assert redis_url(url) == url
