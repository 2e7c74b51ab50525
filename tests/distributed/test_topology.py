"""Which ranks run on which machine."""

import socket

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.distributed.topology import Topology, interface_to, listen


def config(**options):
    return EngineConfig.from_options({"model": "x", "tensor_parallel_size": 4} | options)


def test_options_precede_the_environment_of_torchrun():
    environment = {"NNODES": "4", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234", "NODE_RANK": "0"}
    assert Topology.of(config(), environment) == Topology(4, 4, "10.0.0.9", 1234)
    chosen = config(nnodes=2, master_addr="10.0.0.1", master_port=99)
    assert Topology.of(chosen, environment) == Topology(4, 2, "10.0.0.1", 99)
    assert Topology.of(config(nnodes=2, master_addr="a"), {}).master_port == 29500


def test_one_machine_uses_the_loopback_address_and_a_free_port():
    assert Topology.of(config(), {"MASTER_ADDR": "10.0.0.9"}) == Topology(4, 1, "127.0.0.1", 0)


def test_one_machine_listens_at_the_loopback_address_only():
    with listen(Topology.of(config(), {})) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_stages_multiply_the_ranks():
    staged = config(pipeline_parallel_size=3, nnodes=6, master_addr="a")
    assert Topology.of(staged, {}) == Topology(12, 6, "a", 29500)
    assert (staged.num_ranks, staged.ranks_per_node) == (12, 2)


def test_ranks_are_divided_evenly():
    topology = Topology(6, 3, "a", 1)
    assert [list(topology.ranks_of(node)) for node in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ({"nnodes": 3}, {}, "nnodes=3: must divide the product of tensor_parallel_size=4 and pipeline_parallel_size=1"),
        (
            {"nnodes": 3, "pipeline_parallel_size": 2},
            {},
            "nnodes=3: must divide the product of tensor_parallel_size=4 and pipeline_parallel_size=2",
        ),
        ({"nnodes": 2}, {}, "master_addr: missing; nnodes=2 needs"),
        ({}, {"NNODES": "two"}, "NNODES='two': must be a number"),
        ({"nnodes": 2, "master_addr": "a"}, {"NODE_RANK": "1"}, "NODE_RANK=1: the server is node 0"),
        ({"nnodes": 2, "master_addr": "a"}, {"MASTER_PORT": "x"}, "MASTER_PORT='x': must be a number"),
    ],
)
def test_contradictions_are_rejected(options, environment, message):
    with pytest.raises(ConfigError, match=message):
        Topology.of(config(**options), environment)


def test_address_of_another_machine_cannot_be_bound():
    with pytest.raises(ConfigError, match=r"master_addr, master_port: cannot listen at 192\.0\.2\.1:29500"):
        listen(Topology(2, 2, "192.0.2.1", 29500))


def test_interface_is_the_one_that_reaches_the_address(monkeypatch):
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no such host") is None
    assert "lo" in dict(map(reversed, socket.if_nameindex()))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "none")])  # such as one that has just been removed
    assert interface_to("127.0.0.1") is None
