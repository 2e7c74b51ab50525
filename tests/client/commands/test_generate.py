"""`paged generate` and `paged probe`."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paged_client.cli import main
from paged_client.sync_client import Client
from paged_client.types import PagedError
from tests.support.client_calls import SAY, sampling, standard_input
from tests.support.fake_servers import SERVERS, WAIT

ROOT = Path(__file__).parents[3]


def test_probe_has_highest_priority_and_its_own_cache_salt(command_fake):
    salts = set()
    for _ in range(2):
        assert main(["probe", *command_fake.flags]) == 0
        asked = sampling(command_fake)
        command_fake.seen.requests.clear()
        salts.add(asked.pop("cache_salt"))
        assert asked == {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "priority": -(2**31)}
    assert len(salts) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PagedError("UNAVAILABLE", "the waiting queue is full: 9 requests wait (max_queue_size); retry later"), 0),
        (PagedError("UNAVAILABLE", "the engine has stopped; reload the model"), 1),
        (PagedError("DEADLINE_EXCEEDED", "no answer within 10 s"), 1),
    ],
    ids=str,
)
def test_full_queue_counts_as_healthy(error, code, monkeypatch, grpc_fake):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(Client, "generate", fails)
    assert main(["probe", *grpc_fake.flags]) == code


def test_output_is_printed_and_flags_are_sent(command_fake, capsys):
    flags = [
        "--max-tokens",
        "5",
        "--temperature",
        "0",
        "--top-p",
        "0.5",
        "--top-k",
        "3",
        "--min-p",
        "0.1",
    ]
    flags += ["--seed", "0", "--stop", "a", "--stop", "b", "-p", "ignore_eos=true"]
    assert main(["generate", "Say hello", *command_fake.flags, *flags, "-p", SAY]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("Hello there\n", "")
    assert command_fake.seen.requests[0]["text_input"] == "Say hello"
    assert sampling(command_fake) == {
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 0,
        "stop": ["a", "b"],
        "ignore_eos": True,
    }


def test_by_default_the_output_has_as_many_tokens_as_fit(grpc_fake):
    """The server rejects a number above what the context has room for, and `null` respects the model's own default."""
    assert main(["generate", "x", *grpc_fake.flags, "-p", SAY]) == 0
    assert sampling(grpc_fake) == {"max_tokens": None}


@pytest.mark.parametrize("argument", [[], ["-"]])
def test_prompt_from_standard_input(grpc_fake, monkeypatch, argument):
    standard_input(monkeypatch, "two\nlines\n")
    assert main(["generate", *argument, *grpc_fake.flags, "-p", SAY]) == 0
    assert grpc_fake.seen.requests[0]["text_input"] == "two\nlines"


def test_error_after_partial_output(command_fake, capsys):
    fail = "fail=INVALID_ARGUMENT: top_p=2: no"
    assert main(["generate", "x", *command_fake.flags, "-p", SAY, "-p", fail]) == 1
    captured = capsys.readouterr()
    assert captured.out == "Hello there\n"
    assert captured.err == "paged: INVALID_ARGUMENT: top_p=2: no\n"


@pytest.mark.parametrize("protocol", SERVERS)
def test_no_server(capsys, protocol):
    assert main(["generate", "x", "--protocol", protocol, "--url", "localhost:1"]) == 1
    assert capsys.readouterr().err.startswith("paged: UNAVAILABLE: ")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["-p", "top_k"], "-p top_k: must be KEY=VALUE"),
        (["-p", "a=1", "-p", "a=2"], "-p a=2: a is given twice"),
        (["-p", "top_k=1", "--top-k", "2"], "--top-k is given too"),
        (["-p", "timeout=1"], "-p timeout=…: is not a sampling parameter"),
        (["--timeout", "0"], "timeout=0.0"),
        (["--url", "http://localhost:8001"], "url='http://localhost:8001'"),
    ],
)
def test_usage_errors(capsys, flags, named):
    assert main(["generate", "x", *flags]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("protocol", SERVERS)
@pytest.mark.parametrize(
    "url",
    ["localhost", "localhost:", "localhost:99999", "localhost:0", "localhost:abc", ":8601", "::1", "[::1]", "a b:1",
     "ftp://localhost:1", "http://localhost:99999", "http://:80", "http://", "//localhost:8001"],
)  # fmt: skip
def test_address_that_is_not_host_and_port(capsys, protocol, url):
    for arguments in (["generate", "x"], ["map", "--model", "m"], ["generate", "x", "--show-request"]):
        assert main([*arguments, "--protocol", protocol, "--url", url]) == 2
        assert f"url={url!r}: {'gRPC' if protocol == 'grpc' else 'HTTP'} takes HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:1", "[::1]:1", "unix:/nowhere", "ipv4:127.0.0.1:1"])
def test_grpc_addresses(url, capsys):
    assert main(["generate", "x", "--url", url]) == 1
    assert capsys.readouterr().err.startswith("paged: UNAVAILABLE: ")


def test_metrics_port_is_named(capsys):
    with SERVERS["http"]() as seen:
        seen.index_status = 405
        assert main(["generate", "x", "--protocol", "http", "--url", seen.url]) == 1
    error = capsys.readouterr().err
    assert f"{seen.url} is not Triton's HTTP port: HTTP 405" in error
    assert "and 8002 its metrics port" in error


def test_ctrl_c_cancels_the_request(command_fake):
    """Runs in a subprocess, to test the signal, the exit code and the cancellation on the server."""
    # The background jobs of a shell ignore SIGINT, and so would our child.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    code += "from paged_client.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "generate", "x", *command_fake.flags, "-p", SAY, "-p", "hold=true"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(11) == b"Hello there"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert command_fake.seen.left.wait(WAIT)


def test_closed_output_pipe_has_no_traceback(grpc_fake):
    command = [sys.executable, "-m", "paged_client", "generate", "x", *grpc_fake.flags]
    # More than the buffer of a pipe, so that the command is still writing when its reader closes it.
    many = json.dumps(["x" * 1000] * 100)
    with subprocess.Popen(
        [*command, "-p", f"say={many}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_lora_without_adapters_says_how_to_enable_it(capsys, grpc_fake):
    script = ["-p", "say=[]", "-p", "fail=LoRA feature is not enabled."]
    assert main(["generate", "x", *grpc_fake.flags, *script]) == 1
    assert capsys.readouterr().err.endswith("\nStart the server with --multi-lora FILE to serve adapters.\n")
