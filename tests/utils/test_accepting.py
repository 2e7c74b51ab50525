"""Accepting connections when the process has no free file descriptors."""

import os
import resource
import socket
import threading
from queue import SimpleQueue

from paged_backend.utils import accepting
from tests.support.waiting import WAIT, until


def test_connections_wait_for_free_file_descriptors(monkeypatch, caplog):
    """A listener that ended at the first error would accept nobody any more."""
    monkeypatch.setattr(accepting, "RETRY_SECONDS", 0.01)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    accepted = SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        thread = threading.Thread(target=lambda: [accepted.put(end) for end, _ in accepting.connections(listener)])
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
        try:
            thread.start()
            client.connect(listener.getsockname())
            until(lambda: "connections wait" in caplog.text, "the warning")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in held:
                os.close(descriptor)
        accepted.get(timeout=WAIT).close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT)
        assert not thread.is_alive()
