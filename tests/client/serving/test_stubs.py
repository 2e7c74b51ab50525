"""The processes of a server's models."""

import errno
import os
from pathlib import Path

import pytest

from paged_client.serving import stubs


@pytest.mark.parametrize(
    ("code", "expected"), [(errno.ENOENT, False), (errno.ESRCH, False), (errno.EMFILE, True), (errno.EACCES, True)]
)
def test_a_process_is_dead_only_if_it_is_not_found(monkeypatch, code, expected):
    """Without free file descriptors nothing is known about it."""

    def fail(path):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "read_text", fail)
    assert stubs.runs(os.getpid()) is expected
