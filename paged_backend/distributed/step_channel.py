"""Sends the inputs of each step from rank 0 to all other ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paged_backend.distributed.group_sockets import group_sockets
from paged_backend.distributed.messages import Messages

IDLE_TIMEOUT = timedelta(days=365)  # time between two steps
# Bytes of the first broadcast: the length of a message, and the message if it fits. A decode step of 16 sequences of
# 520 tokens takes 3.7 KB.
FRAME = 8192
LENGTH = np.dtype("<i8")


class StepChannel:
    """Broadcasts of messages over gloo, on the host. All ranks create it at the same time, after they have joined."""

    def __init__(self, key: bytes, *kinds: type) -> None:
        """key: a secret of the ranks. kinds: the types of the messages; see `Messages`."""
        self._messages = Messages(key, "steps", *kinds)
        with group_sockets(gloo=True):
            self._group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)

    def send(self, message: Any) -> None:
        """Send a message to all other ranks. Raises RuntimeError if one cannot be reached."""
        for part in frame_and_content(self._messages.encode(message), FRAME):
            if len(part):
                dist.broadcast(part, 0, self._group)

    def receive(self) -> Any:
        """Wait for the next message of rank 0. Raises RuntimeError if it cannot be reached, or if the message is not
        its next one."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        dist.broadcast(frame, 0, self._group)
        content, missing = content_of(frame)
        if missing:
            content = torch.empty(missing, dtype=torch.uint8)
            dist.broadcast(content, 0, self._group)
        return self._messages.decode(content.numpy().data)


def frame_and_content(data: bytearray, size: int) -> tuple[Tensor, Tensor]:
    """Return a message in two parts: a frame of `size` bytes, with the length of the message and, if it fits, the
    message itself; and a content, which is the message if it does not fit, and empty otherwise."""
    frame = torch.zeros(size, dtype=torch.uint8)
    content = torch.frombuffer(data, dtype=torch.uint8)
    frame[: LENGTH.itemsize] = torch.from_numpy(np.array([len(data)], LENGTH).view(np.uint8))
    if len(data) <= size - LENGTH.itemsize:
        frame[LENGTH.itemsize : LENGTH.itemsize + len(data)] = content
        content = content[:0]
    return frame, content


def content_of(frame: Tensor) -> tuple[Tensor, int]:
    """Return the message in a frame and 0; or, if it did not fit, an empty tensor and the length of the content that
    follows."""
    start, length = LENGTH.itemsize, int(frame.numpy()[: LENGTH.itemsize].view(LENGTH)[0])
    return (frame[start : start + length], 0) if length <= len(frame) - start else (frame[:0], length)
