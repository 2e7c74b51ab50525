"""HTTP bodies and curl commands of requests."""

import json
import shlex
import subprocess

import pytest

from paged_client import http_body
from paged_client.cli import main
from paged_client.request_body import curl_command
from tests.support.fake_servers import SERVERS

MESSAGES = [{"role": "user", "content": 'Say "hi"'}]
SCHEMA = {"type": "object"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_objects_become_strings_that_hold_json():
    body = http_body(messages=MESSAGES, tools=TOOLS, json_schema=SCHEMA, logit_bias={"5": 1.5}, max_tokens=3)
    assert json.loads(body["messages"]) == MESSAGES
    assert json.loads(body["tools"]) == TOOLS
    assert json.loads(body["sampling_parameters"]) == {
        "json_schema": SCHEMA,
        "logit_bias": {"5": 1.5},
        "max_tokens": 3,
    }
    assert body["stream"] is False
    assert not any(isinstance(value, dict) for value in body.values())


def test_body_equals_what_the_client_sends():
    with SERVERS["http"]() as seen:
        assert main(["generate", "it's", "--url", seen.url, "--protocol", "http", "-p", "seed=5"]) == 0
        (sent,) = seen.requests
    expected = http_body("it's", stream=True, max_tokens=None, seed=5)
    assert {**expected, "request_id": ""} == sent


def test_body_needs_a_prompt_or_messages():
    with pytest.raises(ValueError, match="exactly one of prompt and messages"):
        http_body(max_tokens=3)


@pytest.mark.parametrize("stream", [True, False])
def test_shown_command_can_be_pasted(capfd, stream):
    """The printed command runs in a shell against a server, which gets the same request as from the client."""
    with SERVERS["http"]() as seen:
        flags = ["--url", seen.url, "--protocol", "http", "--model", "paged_llm", *([] if stream else ["--no-stream"])]
        assert main(["generate", "it's $HOME", "--max-tokens", "3", "--show-request", *flags]) == 0
        assert seen.requests == []
        command = capfd.readouterr().out
        subprocess.run(["bash", "-c", command.replace("/generate ", "/generate_stream ")], check=True, timeout=60)
        (sent,) = seen.requests
    assert sent["text_input"] == "it's $HOME"
    assert json.loads(sent["sampling_parameters"]) == {"max_tokens": 3}
    assert ("/generate_stream" in command) == stream


def test_shown_command_needs_no_server(capsys):
    assert main(["generate", "x", "--show-request", "--timeout", "5", "--url", "somewhere:8001"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:5] == ["curl", "-N", "--max-time", "5", "http://somewhere:8000/v2/models/paged_llm/generate_stream"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("somewhere:8001", "http://somewhere:8000/"),
        ("[::1]:8001", "http://[::1]:8000/"),
        ("unix:/nowhere", "http://localhost:8000/"),
    ],
)
def test_shown_command_has_the_http_port_of_the_grpc_host(capsys, url, shown):
    assert main(["generate", "x", "--show-request", "--url", url]) == 0
    captured = capsys.readouterr()
    assert shlex.split(captured.out)[2].startswith(shown)
    address = shown.removeprefix("http://").removesuffix("/")
    assert captured.err == (
        f"note: the HTTP address is assumed to be {address}; pass --protocol http --url HOST:PORT for another one\n"
    )


@pytest.mark.parametrize("protocol", SERVERS)
def test_shown_command_has_the_name_of_the_model(capsys, protocol):
    with SERVERS[protocol]() as seen:
        seen.models = {"foo": ["text_input", "pool_map"]}
        assert main(["generate", "x", "--show-request", "--url", seen.url, "--protocol", protocol]) == 0
        assert "/v2/models/foo/generate_stream" in capsys.readouterr().out
        assert seen.requests == []
        seen.models = {}
        assert main(["generate", "x", "--show-request", "--url", seen.url, "--protocol", protocol]) == 1


def test_command_quotes_its_body():
    assert shlex.split(curl_command("h:1", "m", {"text_input": "a'b"}))[-1] == '{"text_input": "a\'b"}'
