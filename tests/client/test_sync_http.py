"""Responses of the HTTP endpoints."""

import os

import pytest

from paged_client import Client, PagedError
from tests.support.client_calls import texts


def test_no_file_descriptor_leaks(fake, protocol):
    if protocol == "grpc":
        pytest.skip("gRPC keeps descriptors for its own pollers")
    client = Client(fake.url, protocol=protocol)
    before = len(os.listdir("/proc/self/fd"))
    ended = []  # kept, so that it is not their deletion that closes
    for _ in range(20):
        ended += [client.stream("x", say=["a"]), client.stream("x", say=[], fail="INTERNAL: no")]
        assert texts(ended[-2]) == ["a"]
        with pytest.raises(PagedError):
            next(ended[-1])
    # The fake's own ends of the last connections may take a moment longer.
    assert len(os.listdir("/proc/self/fd")) < before + 20
