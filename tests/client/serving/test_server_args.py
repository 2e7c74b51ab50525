"""Options of tritonserver after `paged serve … --`."""

import pytest

from paged_client.serving.launch import serve
from paged_client.serving.server_args import check_server_args, hosts, listening_address, listening_at, open_addresses
from paged_client.serving.supervisor import RestartPolicy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--http-port", "1"], "--http-port=1: cannot be set; it is an option of paged serve"),
        (["--allow-metrics=false"], "--allow-metrics=false: cannot be set; paged serve reads the metrics"),
        (
            ["--http-restricted-api=health,trace:key=1"],
            "health,trace:key=1: cannot restrict health",
        ),
    ],
)
def test_options_that_do_not_work_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_server_args(["--log-verbose=1", *arguments])


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--allow-grpc=false", "cannot be set; {} use gRPC"),
        ("--grpc-use-ssl=true", "cannot be set; {} use gRPC without TLS"),
        ("--grpc-restricted-protocol=inference:k=1", "cannot restrict inference; {} have no key"),
    ],
)
def test_options_that_close_the_grpc_port_to_paged_serve_are_rejected(flag, reason, tmp_path, capsys):
    check_server_args([flag])
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    for users, arguments in {
        "the probes of --restart": {"restart": RestartPolicy()},
        "the requests of --openai-port": {"openai_port": 0},
    }.items():
        assert serve(str(tmp_path), server_args=[flag], **ports, **arguments) == 1
        assert capsys.readouterr().err == f"error: {flag}: {reason.format(users)}\n"


def test_a_server_is_reached_where_it_listens():
    assert hosts([]) == hosts(["--http-address=0.0.0.0", "--grpc-address", "::"]) == ("localhost",) * 3
    assert hosts(["--http-address=127.0.0.2"]) == ("127.0.0.2", "localhost", "127.0.0.2")
    assert listening_address([]) == "0.0.0.0"
    assert listening_address(["--http-address=127.0.0.2"]) == "127.0.0.2"
    assert listening_address(["--http-address", "ipv6:::1"]) == listening_address(["--http-address=[::1]"]) == "::1"
    assert hosts(["--metrics-address", "::1", "--grpc-address=a", "--grpc-address=b"]) == ("localhost", "b", "[::1]")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::", "192.0.2.1"])
def test_all_endpoints_listen_at_the_host(host):
    arguments = listening_at(host)
    assert listening_address(arguments) == host
    assert len(set(hosts(arguments))) == 1
    assert len(open_addresses(arguments)) == (0 if host in ("127.0.0.1", "::1") else 3)


def test_later_options_replace_the_host():
    arguments = [*listening_at("127.0.0.1"), "--http-address=0.0.0.0"]
    assert open_addresses(arguments) == ["--http-address=0.0.0.0"]
    assert hosts([*listening_at("0.0.0.0"), "--grpc-address=127.0.0.2"]).grpc == "127.0.0.2"
