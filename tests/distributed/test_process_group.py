"""A group of one rank, and what a group leaves behind."""

import os

import torch
import torch.distributed as dist

from paged_backend.distributed.process_group import ProcessGroup


def test_group_of_one_rank_needs_no_process_group():
    group, tokens = ProcessGroup(torch.device("cpu")), torch.tensor([1, 2])
    assert group.all_reduce_min(7) == 7
    group.broadcast_tokens(tokens)
    assert tokens.tolist() == [1, 2]
    group.leave()


def test_network_interface_is_chosen_anew_for_each_group(monkeypatch):
    """A server that is started by this process inherits its environment, and may need another interface."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    group = ProcessGroup(torch.device("cpu"))
    group.join(dist.HashStore())
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    group.leave()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_interface_of_the_environment_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group = ProcessGroup(torch.device("cpu"))
    group.join(dist.HashStore())
    group.leave()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
