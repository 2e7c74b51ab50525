"""The options of connections that notice a machine that is gone."""

import socket

from paged_backend.distributed.keep_alive import SECONDS, new_connections_kept_alive


def is_kept_alive(connection):
    timeout = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) and timeout == 1000 * SECONDS


def test_only_new_connections_are_kept_alive():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        before = socket.create_connection(listening.getsockname())
        with new_connections_kept_alive():
            inside = socket.create_connection(listening.getsockname())
            accepted, _ = listening.accept()
            local, other = socket.socketpair()  # not TCP
        assert [is_kept_alive(one) for one in (before, inside)] == [False, True]
        for one in (before, inside, accepted, local, other):
            one.close()
