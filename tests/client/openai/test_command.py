"""The command `paged openai`."""

import contextlib
import resource
import signal
import socket

import openai
import pytest

from paged_client import cli
from paged_client.openai import command
from tests.support.gateway import PROMPT, WAIT, error_of, gateway, gateway_process
from tests.support.waiting import until


def test_ctrl_c_finishes_open_streams_and_rejects_new_ones(fake, says):
    fake.left.clear()
    with gateway_process(fake.url) as front, says(say=["a"], hold=True):
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        with client.completions.create(**PROMPT, stream=True) as stream:
            assert next(stream).choices[0].text == "a"
            front.process.send_signal(signal.SIGINT)
            until(lambda: refused(front.port), "the end of new connections")
            assert not fake.left.is_set()
            fake.left.set()  # the fake server ends the stream
            with pytest.raises(openai.APIError, match="the stream ended"):
                next(stream)
        assert front.process.wait(WAIT) == 130


def test_second_ctrl_c_cuts_open_streams_without_a_traceback(fake, says, tmp_path):
    fake.left.clear()
    log = tmp_path / "log"
    with log.open("w") as errors, gateway_process(fake.url, errors=errors) as front, says(say=["a"], hold=True):
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        with client.completions.create(**PROMPT, stream=True) as stream:
            assert next(stream).choices[0].text == "a"
            front.process.send_signal(signal.SIGINT)
            until(lambda: refused(front.port), "the end of new connections")
            front.process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="the client was closed"):
                next(stream)
        assert front.process.wait(WAIT) == 130
    assert "Traceback" not in log.read_text()


def refused(port):
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) != 0


def test_connections_without_complete_headers_are_closed(fake, says):
    """Streams last longer than the time for headers."""
    fake.left.clear()
    with gateway(fake.url, "--body-timeout", "0.5") as front, says(say=["a"], hold=True):
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        with client.completions.create(**PROMPT, stream=True) as stream:
            assert next(stream).choices[0].text == "a"
            for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
                with socket.create_connection(("127.0.0.1", front.port), WAIT) as connection:
                    connection.sendall(sent)
                    assert closed(connection)
            fake.left.set()
            with pytest.raises(openai.APIError, match="the stream ended"):
                next(stream)


def test_connections_leave_file_descriptors_for_everything_else(fake, monkeypatch):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(command, "OTHER_DESCRIPTORS", most - 2)
    with gateway(fake.url) as front, contextlib.ExitStack() as stack:
        _, second, third = (
            stack.enter_context(socket.create_connection(("127.0.0.1", front.port), WAIT)) for _ in range(3)
        )
        assert closed(third)
        second.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert second.recv(100).startswith(b"HTTP/1.1 200")


def closed(connection):
    """Wait until the other side closes a connection, and return whether it has sent nothing."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_model_option(fake):
    with gateway(fake.url, "--model", "other") as front:
        for answer in (front.ask("/v1/completions", PROMPT | {"model": "other"}), front.ask("/v1/models")):
            assert answer[0] == 503, "the fake server has no such model"
            assert "unknown model: 'other'" in error_of(*answer)["message"]


class TestCommand:
    def test_connections_use_tcp_nodelay(self):
        with command.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), WAIT):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_port_in_use_is_rejected(self, front, capsys):
        assert cli.main(["openai", "--port", str(front.port)]) == 2
        assert f"--port {front.port}" in capsys.readouterr().err

    def test_url_with_scheme_is_rejected(self, capsys):
        assert cli.main(["openai", "--url", "http://localhost:8000"]) == 2
        assert "HOST:PORT" in capsys.readouterr().err

    def test_directory_without_tokenizer_is_rejected(self, tmp_path, capsys):
        assert cli.main(["openai", "--tokenizer", str(tmp_path)]) == 2
        assert f"--tokenizer {tmp_path}" in capsys.readouterr().err
