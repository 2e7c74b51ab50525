"""Sends frames to an engine in another process, and the blocks of requests with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from paged_backend.engine.moved_blocks import BlockRun
from paged_backend.utils.local_socket import Connection, FrameError, pack


class FrameSender:
    """Queues frames, and sends them on a thread of its own. The methods may be called from any thread, and do not
    block."""

    def __init__(self, connection: Connection, on_rejected: Callable[[int, str], object]):
        """on_rejected: called with the id of a frame that is too large, and the reason, on the thread."""
        self._connection = connection
        self._on_rejected = on_rejected
        self._frames: SimpleQueue[tuple[dict[str, Any], list[memoryview]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unsent_bytes = 0  # guarded by the lock, like the callbacks
        self._callbacks: dict[int, Callable[[], object]] = {}  # by id of the blocks
        self._closed = False
        threading.Thread(target=self._run, name="remote engine sender", daemon=True).start()

    @property
    def unsent_bytes(self) -> int:
        """The bytes of blocks that wait to be sent."""
        return self._unsent_bytes

    def put(self, frame: dict[str, Any]) -> None:
        """Queue a frame."""
        self._frames.put((frame, []))

    def put_blocks(
        self, request_id: int, blocks: Sequence[BlockRun], stored: Callable[[], object] | None = None
    ) -> None:
        """Queue blocks. Blocks that are too large for a frame are left out. stored: called on any thread when the
        other engine has stored the blocks or cannot store them."""
        sent = [run for run in blocks if run.nbytes <= self._connection.max_frame_bytes]
        with self._lock:
            self._unsent_bytes += sum(run.nbytes for run in sent)
            if stored:
                self._callbacks[request_id] = stored
        for run in sent:
            values, attached = run.write()
            last = {"acknowledge": True} if stored and run is sent[-1] else {}
            self._frames.put(({"id": request_id, "blocks": values, "attached": run.nbytes} | last, attached))
        if not sent or self._closed:
            self.on_stored(request_id)

    def on_stored(self, request_id: int) -> None:
        """Call what waits for these blocks."""
        with self._lock:
            callback = self._callbacks.pop(request_id, None)
        if callback:
            callback()

    def close(self) -> None:
        """End the thread, and call everything that waits for blocks: the connection has ended."""
        self._closed = True
        self._frames.put(None)
        for request_id in list(self._callbacks):
            self.on_stored(request_id)

    def _run(self) -> None:
        while (item := self._frames.get()) is not None:
            frame, attached = item
            try:
                self._connection.send(pack(frame, self._connection.max_frame_bytes), attached)
            except FrameError as error:
                self.on_stored(frame["id"])
                if "blocks" not in frame:
                    self._on_rejected(frame["id"], str(error))
            except OSError:  # the thread that receives closes this one
                return
            with self._lock:
                self._unsent_bytes -= sum(map(len, attached))
