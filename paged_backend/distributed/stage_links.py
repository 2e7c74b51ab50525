"""Sends hidden states from each stage of a pipeline to the next, and the results of the last stage to rank 0.

    rank 0 ----- hidden states -----> rank 2 ----- hidden states -----> rank 4       tensor_parallel_size=2,
    rank 1 ----- hidden states -----> rank 3 ----- hidden states -----> rank 5       pipeline_parallel_size=3
       ^                                                                   |
       '------------------- results, from the first rank (4) of the last stage

On GPUs hidden states move with NCCL. On CPUs a receive is posted as soon as its step is known, so that hidden states
arrive while the step before is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paged_backend.distributed.group_sockets import group_sockets
from paged_backend.distributed.messages import Messages
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.distributed.step_channel import content_of, frame_and_content

TIMEOUT = timedelta(minutes=10)  # time for a step to pass through all stages
HIDDEN_STATES, RESULTS, MORE_RESULTS = range(3)  # tags; several frames may be awaited before the first content
RESULT_FRAME = 1024  # bytes of a result's first message; the results of 16 sequences take 0.7 KB


class StageLinks:
    """The links of one rank with the stages beside its own. All ranks create them at the same time.
    `expect_hidden_states` may be called by another thread than the other methods."""

    def __init__(self, group: ProcessGroup, stages: int, hidden_size: int, dtype: torch.dtype, result: type):
        """hidden_size, dtype: size and type of the hidden states. result: the type of the results; see `Messages`."""
        assert group.size % stages == 0
        self._width = group.size // stages
        self._rank, self._device = group.rank, group.device
        self._hidden_size, self._dtype, self._stages = hidden_size, dtype, stages
        self._messages = Messages(group.key, "results", result)
        self._last = group.size - self._width  # the rank that sends the results
        with group_sockets(gloo=True):
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()  # tensors are kept until they have been sent

    @property
    def sends_results(self) -> bool:
        """Whether this rank sends the results of a step to rank 0: the first rank of the last stage does."""
        return self._rank == self._last

    def expect_hidden_states(self, num_tokens: int) -> Callable[[], Tensor] | None:
        """Return a function that waits for the hidden states [num_tokens, hidden_size] of the previous stage; None in
        the first stage. Steps must be expected in the order in which they are launched."""
        if self._rank < self._width:
            return None
        if self._device.type == "cpu":
            return self._receive(torch.empty(num_tokens, self._hidden_size, dtype=self._dtype))
        # Posted by the caller that waits: its stream is the one that computes.
        return lambda: self._receive(
            torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        )()

    def send_hidden_states(self, hidden_states: Tensor) -> None:
        """Send hidden states [num_tokens, hidden_size] to the next stage. Does not wait for the device or the other
        stage."""
        hidden_states = hidden_states.contiguous()
        group = self._group if self._device.type == "cpu" else None
        self._keep(dist.isend(hidden_states, self._rank + self._width, group=group, tag=HIDDEN_STATES), hidden_states)

    def send_results(self, message: Any) -> None:
        """Send the results of a step to rank 0. Does not wait for it."""
        parts = frame_and_content(self._messages.encode(message), RESULT_FRAME)
        for tag, part in zip((RESULTS, MORE_RESULTS), parts, strict=True):
            if len(part):
                self._keep(dist.isend(part, 0, group=self._group, tag=tag), part)

    def expect_results(self) -> Callable[[], Any]:
        """Return a function that waits for the results of the next step. Raises RuntimeError if the last stage cannot
        be reached, or if the message is not its next one. Results must be awaited in the order in which they are
        expected."""
        frame = torch.empty(RESULT_FRAME, dtype=torch.uint8)
        work = dist.irecv(frame, self._last, group=self._group, tag=RESULTS)
        assert work is not None

        def wait() -> Any:
            work.wait()
            content, missing = content_of(frame)
            if missing:
                content = torch.empty(missing, dtype=torch.uint8)
                dist.recv(content, self._last, group=self._group, tag=MORE_RESULTS)
            return self._messages.decode(content.numpy().data)

        return wait

    def _receive(self, hidden_states: Tensor) -> Callable[[], Tensor]:
        group = self._group if self._device.type == "cpu" else None
        work = dist.irecv(hidden_states, self._rank - self._width, group=group, tag=HIDDEN_STATES)
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            return hidden_states

        return wait

    def _keep(self, work: dist.Work | None, tensor: Tensor) -> None:
        assert work is not None
        self._sent.append((work, tensor))
        while len(self._sent) > 2 * self._stages:  # its step was committed, so it was received
            self._sent.popleft()[0].wait()
