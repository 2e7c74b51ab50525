"""Hidden states from stage to stage and results to rank 0, over gloo between three processes."""

import multiprocessing
from typing import NamedTuple

import torch
import torch.distributed as dist

from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.distributed.stage_links import RESULT_FRAME, StageLinks

RANKS, HIDDEN = 3, 8
STEPS = [4, 1, 300]  # tokens
RESULTS = [b"short", b"x" * RESULT_FRAME, b"y" * (3 * RESULT_FRAME)]


class Result(NamedTuple):
    text: bytes
    total: float


def states(tokens):
    return torch.arange(tokens * HIDDEN, dtype=torch.float32).view(tokens, HIDDEN)


def run_rank(rank, port, found):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group = ProcessGroup(torch.device("cpu"), rank, RANKS, b"secret of the ranks")
    group.join(store)
    links = StageLinks(group, RANKS, HIDDEN, torch.float32, Result)
    if rank == 0:
        waits = [links.expect_results() for _ in STEPS]  # all steps are in flight before any result is read
        assert links.expect_hidden_states(1) is None
        for tokens in STEPS:
            links.send_hidden_states(states(tokens))
        found.put([wait() for wait in waits])
    else:
        for wait, result in zip([links.expect_hidden_states(tokens) for tokens in STEPS], RESULTS, strict=True):
            if links.sends_results:
                links.send_results(Result(result, wait().sum().item()))
            else:
                links.send_hidden_states(wait() + 1)
    assert group.all_gather([rank]) == [[0], [1], [2]]  # all have sent everything
    group.leave()


def test_states_and_results_of_steps_in_flight_arrive_in_order():
    """All ranks run in processes of their own, because a process can be in one group only."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # once for all processes
    found = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [context.Process(target=run_rank, args=(rank, store.port, found)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    results = found.get(timeout=120)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    sums = [(states(tokens) + 1).sum().item() for tokens in STEPS]
    assert results == [Result(*one) for one in zip(RESULTS, sums, strict=True)]
