"""The local socket between models of one server: frames, and the socket directory."""

import os
import socket

import pytest

from paged_backend.server.connections import listener
from paged_backend.utils import local_socket
from paged_backend.utils.local_socket import Connection, FrameError, pack
from tests.support.local_engine import Engine, connected

pytestmark = pytest.mark.usefixtures("socket_directory")


def test_an_oversized_frame_is_neither_sent_nor_read():
    with pytest.raises(FrameError, match=r"a frame of 14 bytes; at most 10 can be sent \(max_frame_bytes\)"):
        pack({"id": 1234567}, 10)
    near, far = socket.socketpair()
    Connection(near).send(pack({"id": 1234567}))
    with pytest.raises(FrameError, match=r"a frame of 14 bytes; at most 10 can be received \(max_frame_bytes\)"):
        next(Connection(far, 10).frames())
    near.close()


def test_a_directory_accessible_to_others_is_rejected(socket_directory, monkeypatch):
    socket_directory.mkdir(mode=0o700)
    for mode in (0o755, 0o750, 0o701):
        socket_directory.chmod(mode)
        with pytest.raises(PermissionError, match="must belong to user"):
            local_socket.listen("engine")
    socket_directory.rmdir()
    socket_directory.symlink_to(socket_directory.parent)
    with pytest.raises(OSError, match="Not a directory"):
        local_socket.listen("engine")
    someone = os.getuid() + 1
    monkeypatch.setattr(local_socket.os, "getuid", lambda: someone)
    with pytest.raises(PermissionError, match=f"must belong to user {someone}"):
        local_socket.find("engine")


def test_another_users_process_is_rejected(engine, monkeypatch):
    monkeypatch.setattr(listener.local_socket, "is_own", lambda end: False)
    assert list(connected().frames()) == []
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        monkeypatch.undo()
        assert local_socket.is_own(ours)
        someone = os.getuid() + 1
        monkeypatch.setattr(local_socket.os, "getuid", lambda: someone)
        assert not local_socket.is_own(ours)


def test_sockets_of_dead_engines_are_removed(engine, socket_directory):
    stale, _ = local_socket.listen("gone")
    stale.close()
    assert len(list(socket_directory.iterdir())) == 2
    Engine("another")
    assert not local_socket.find("gone")
    assert local_socket.find("another") and local_socket.find("engine")
