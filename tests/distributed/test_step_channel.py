"""Messages from rank 0 to the other ranks, over gloo between two processes."""

import multiprocessing
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.distributed.step_channel import FRAME, StepChannel


@dataclass
class Rows:
    tokens: torch.Tensor


KEY = b"secret of the ranks"
KINDS = (Rows, bytes, type(None))
MESSAGES = [Rows(torch.arange(5)), b"x" * (FRAME - 40), b"y" * FRAME, b"z" * (3 * FRAME), None]


def receive(port, results):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    ProcessGroup(torch.device("cpu"), 1, 2).join(store)
    channel = StepChannel(KEY, *KINDS)
    for _ in MESSAGES:
        message = channel.receive()
        # A tensor would have to be fetched from this process while it still runs.
        results.put(message.tokens.tolist() if isinstance(message, Rows) else message)


def send(results):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    other = context.Process(target=receive, args=(store.port, results))
    other.start()
    group = ProcessGroup(torch.device("cpu"), 0, 2)
    group.join(store)
    channel = StepChannel(KEY, *KINDS)
    for message in MESSAGES:
        channel.send(message)
    other.join()
    group.leave()


def test_messages_of_any_length_arrive_in_order():
    """Both ranks run in processes of their own, because a process can be in one group only."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # once for both processes
    results = context.Queue()
    process = context.Process(target=send, args=(results,))
    process.start()
    first, *others = [results.get(timeout=120) for _ in MESSAGES]
    process.join()
    assert process.exitcode == 0
    assert first == [0, 1, 2, 3, 4]
    assert others == MESSAGES[1:]
