"""A group of one rank."""

import torch

from paged_backend.distributed.process_group import ProcessGroup


def test_group_of_one_rank_needs_no_process_group():
    group, tokens = ProcessGroup(torch.device("cpu")), torch.tensor([1, 2])
    assert group.all_reduce_min(7) == 7
    group.broadcast_tokens(tokens)
    assert tokens.tolist() == [1, 2]
    group.leave()
