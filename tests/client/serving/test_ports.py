"""Ports of a server."""

import socket

import pytest

from paged_client.serving.ports import FREE_PORTS, choose_ports


def test_all_ports_in_use_are_reported():
    with socket.socket() as one, socket.socket() as two:
        for holder in (one, two):
            holder.bind(("", 0))
            holder.listen()
        first, second = (holder.getsockname()[1] for holder in (one, two))
        with pytest.raises(ValueError, match=rf"http_port={first}: .*; metrics_port={second}: "):
            choose_ports(http_port=first, grpc_port=0, metrics_port=second)


def test_same_port_twice_is_rejected():
    (port,) = choose_ports(any=0)
    with pytest.raises(ValueError, match=f"http_port=grpc_port={port}: must differ"):
        choose_ports(http_port=port, grpc_port=port)


def test_port_out_of_range_is_rejected():
    with pytest.raises(ValueError, match=r"http_port=65536: must be 0\.\.65535"):
        choose_ports(http_port=65536)


def test_chosen_ports_differ():
    assert len(set(choose_ports(a=0, b=0, c=0))) == 3


def test_chosen_ports_are_not_those_of_outgoing_connections():
    assert all(port in FREE_PORTS for port in choose_ports(a=0, b=0))
