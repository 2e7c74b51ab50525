"""What becomes of the sockets of process groups: connections notice a machine that is gone, and ports are closed."""

import socket

import pytest

from paged_backend.distributed.group_sockets import group_sockets
from paged_backend.distributed.keep_alive import SECONDS


def is_kept_alive(connection):
    timeout = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) and timeout == 1000 * SECONDS


def test_only_new_connections_are_kept_alive():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        before = socket.create_connection(listening.getsockname())
        with group_sockets(gloo=True):
            inside = socket.create_connection(listening.getsockname())
            accepted, _ = listening.accept()
            local, other = socket.socketpair()  # not TCP
        assert [is_kept_alive(one) for one in (before, inside)] == [False, True]
        for one in (before, inside, accepted, local, other):
            one.close()


@pytest.mark.parametrize("gloo", [False, True])
def test_ports_of_gloo_accept_nobody_later(gloo):
    with socket.create_server(("127.0.0.1", 0)) as other:
        with group_sockets(gloo=gloo):
            listening = socket.create_server(("127.0.0.1", 0))
            member = socket.create_connection(listening.getsockname())
            accepted, _ = listening.accept()
        socket.create_connection(other.getsockname()).close()
        with socket.socket() as stranger:
            stranger.settimeout(0.2)
            assert (stranger.connect_ex(listening.getsockname()) == 0) is not gloo
        member.sendall(b"a step")  # goes on
        assert accepted.recv(6) == b"a step"
        for one in (listening, member, accepted):
            one.close()
