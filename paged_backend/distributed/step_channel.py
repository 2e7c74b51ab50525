"""Sends the inputs of each step from rank 0 to all other ranks."""

from __future__ import annotations

import io
import pickle
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paged_backend.distributed.keep_alive import new_connections_kept_alive

IDLE_TIMEOUT = timedelta(days=365)  # time between two steps
# Bytes of the first broadcast: the length of a message, and the message if it fits. A decode step of 16 sequences of
# 520 tokens takes 3.7 KB.
FRAME = 8192
LENGTH = np.dtype("<i8")


class StepChannel:
    """Broadcasts of messages over gloo, on the host. All ranks create it at the same time, after they have joined."""

    def __init__(self) -> None:
        with new_connections_kept_alive():
            self._group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)

    def send(self, message: Any) -> None:
        """Send a message to all other ranks. Raises RuntimeError if one cannot be reached."""
        data = pickled(message)
        frame = torch.zeros(FRAME, dtype=torch.uint8)
        content = torch.frombuffer(data, dtype=torch.uint8)
        frame[: LENGTH.itemsize] = torch.from_numpy(np.array([len(data)], LENGTH).view(np.uint8))
        if len(data) <= FRAME - LENGTH.itemsize:
            frame[LENGTH.itemsize : LENGTH.itemsize + len(data)] = content
            content = content[:0]
        for part in (frame, content):
            if len(part):
                dist.broadcast(part, 0, self._group)

    def receive(self) -> Any:
        """Wait for the next message of rank 0. Raises RuntimeError if it cannot be reached."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        dist.broadcast(frame, 0, self._group)
        start, length = LENGTH.itemsize, int(frame.numpy()[: LENGTH.itemsize].view(LENGTH)[0])
        content = frame[start : start + length]
        if length > FRAME - start:
            content = torch.empty(length, dtype=torch.uint8)
            dist.broadcast(content, 0, self._group)
        return pickle.loads(content.numpy())


class _Pickler(pickle.Pickler):
    """Pickles tensors on the host as NumPy arrays, which is far faster than as tensors."""

    dispatch_table = {Tensor: lambda tensor: (torch.from_numpy, (tensor.numpy(),))}  # noqa: RUF012


def pickled(message: Any) -> bytearray:
    """Return a message as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, 5).dump(message)
    return bytearray(buffer.getbuffer())
