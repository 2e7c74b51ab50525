"""Tool calls and reasoning through NVIDIA Dynamo's frontend: recorded outputs of model families, and agents' sessions.

A server with a model of each family plays the outputs. The worker chooses the parsers by their chat templates.
"""

import json
import urllib.request
from pathlib import Path

import openai
import pytest

from tests.support.dynamo import frontend, harmony_vocabulary
from tests.support.processes import needs_server
from tests.support.scripted_families import ANSWER, FAMILIES, THOUGHT, scripted_server
from tests.support.triton import MODEL
from tests.support.waiting import WAIT

pytestmark = [needs_server, pytest.mark.nightly]
HERE = Path(__file__).parent
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CITY = PARAMETERS | {"properties": {"city": {"enum": ["Paris", "Rome"]}}, "additionalProperties": False}


def name_of(family):
    return MODEL if family == "qwen3" else family


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("families"), *FAMILIES) as made:
        yield made


@pytest.fixture(scope="module")
def front(server, tmp_path_factory):
    """A frontend with one worker, which serves all models of the server."""
    names = [name_of(family) for family in FAMILIES]
    flags = tuple(part for name in names for part in ("--model", name))
    with (
        frontend(tmp_path_factory.mktemp("discovery"), TIKTOKEN_ENCODINGS_BASE=str(harmony_vocabulary())) as made,
        made.worker(server, flags=flags),
    ):
        made.wait_for(*names)
        yield made


@pytest.fixture
def client(front):
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=WAIT) as made:
        yield made


def ask(client, family, script, stream, **fields):
    """Return (text, reasoning, [(tool, arguments)], finish reason) of an answer."""
    wanted = {"model": name_of(family), "messages": [{"role": "user", "content": f"Play {script}."}], "max_tokens": 200}
    if not stream:
        (choice,) = client.chat.completions.create(**wanted, **fields).choices
        message, calls = choice.message, choice.message.tool_calls or []
        found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        return message.content or "", getattr(message, "reasoning_content", None) or "", found, choice.finish_reason
    text, reasoning, reason, calls = "", "", None, {}
    for part in client.chat.completions.create(**wanted, **fields, stream=True):
        for choice in part.choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                name, arguments = calls.get(call.index, ("", ""))
                calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    return text, reasoning, [(name, json.loads(arguments)) for name, arguments in calls.values()], reason


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
class TestFamilies:
    @pytest.mark.parametrize("family", ["qwen3", "coder", "llama", "mistral", "gpt-oss"])
    def test_a_tool_call(self, client, family, stream):
        text, reasoning, calls, reason = ask(client, family, "one-call", stream, tools=[TOOL])
        assert (calls, reason) == ([("get_weather", {"city": "Paris"})], "tool_calls")
        assert (text.strip(), reasoning.strip()) == ("", THOUGHT if family == "gpt-oss" else "")

    def test_a_marked_tool_call(self, client, stream):
        calls = ask(client, "llama", "marked-call", stream, tools=[TOOL])[2]
        assert calls == [("get_weather", {"city": "Paris"})]

    def test_several_tool_calls(self, client, stream):
        text, _, calls, reason = ask(client, "qwen3", "two-calls", stream, tools=[TOOL])
        assert calls == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
        assert (text.strip(), reason) == ("Both cities.", "tool_calls")

    @pytest.mark.parametrize("family", ["qwen3", "r1", "gpt-oss"])
    def test_reasoning(self, client, family, stream):
        text, reasoning, calls, reason = ask(client, family, "thinking-answer", stream)
        assert (text.strip(), reasoning.strip(), calls, reason) == (ANSWER, THOUGHT, [], "stop")

    def test_reasoning_before_a_tool_call(self, client, stream):
        text, reasoning, calls, _ = ask(client, "qwen3", "thinking-call", stream, tools=[TOOL])
        assert (text.strip(), reasoning.strip()) == ("", THOUGHT)
        assert calls == [("get_weather", {"city": "Paris"})]

    @pytest.mark.parametrize("family", ["qwen3", "coder", "llama", "mistral"])
    def test_an_answer_without_a_call(self, client, family, stream):
        assert ask(client, family, "plain-answer", stream, tools=[TOOL]) == (ANSWER, "", [], "stop")

    def test_structured_outputs_come_without_reasoning(self, client, stream):
        """The engine follows the schema from the first token."""
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
        text, reasoning, _, _ = ask(client, "qwen3", "thinking-answer", stream, response_format=form, temperature=1)
        assert json.loads(text)["city"] in ("Paris", "Rome")
        assert reasoning == ""


def test_limits_of_reasoning_reach_the_engine(client):
    """It rejects one for a model whose chat template marks no reasoning."""
    fields = {"extra_body": {"nvext": {"max_thinking_tokens": 4}}}
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget=4: "):
        ask(client, "llama", "plain-answer", False, **fields)
    assert ask(client, "qwen3", "plain-answer", False, **fields)[0] == ANSWER


def test_priorities_reach_the_engine(client):
    """Urgent requests have high numbers in Dynamo, and low ones in the engine, which the server limits."""
    fields = {"extra_body": {"nvext": {"agent_hints": {"priority": 1}}}}
    with pytest.raises(openai.BadRequestError, match=r"priority=-1: must be 0\.\.2147483647 \(min_priority\)"):
        ask(client, "qwen3", "plain-answer", False, **fields)
    fields["extra_body"]["nvext"]["agent_hints"]["priority"] = -1
    assert ask(client, "qwen3", "plain-answer", False, **fields)[0] == ANSWER


def events(front, path, headers, body):
    """Return the type and the data of each event of a stream."""
    request = urllib.request.Request(front.url + path, json.dumps(body).encode())
    for name, value in (headers | {"Content-Type": "application/json"}).items():
        request.add_header(name, value)
    with urllib.request.urlopen(request, timeout=WAIT) as reply:
        assert reply.status == 200
        blocks = reply.read().decode().strip().split("\n\n")
    pairs = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
    return [(pair["event"], json.loads(pair["data"])) for pair in pairs if "event" in pair]


def session(name):
    found = json.loads((HERE / f"{name}_session.json").read_text())
    return found["path"], found["headers"], found["turns"]


def test_session_of_codex(front):
    path, headers, turns = session("codex")
    for turn in turns:
        found = events(front, path, headers, turn["request"])
        assert [found[0][0], found[-1][0]] == ["response.created", "response.completed"]
        output = found[-1][1]["response"]["output"]
        calls = [one for one in output if one["type"] == "function_call"]
        expected = turn.get("calls", [])
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
            (call["name"], call["arguments"]) for call in expected
        ]
        done = [data for kind, data in found if kind == "response.function_call_arguments.done"]
        assert [json.loads(data["arguments"]) for data in done] == [call["arguments"] for call in expected]
        text = "".join(data["delta"] for kind, data in found if kind == "response.output_text.delta")
        assert text.strip() == turn.get("text", "")


def test_session_of_claude_code(front):
    path, headers, turns = session("claude_code")
    for turn in turns:
        found = events(front, path, headers, turn["request"])
        assert [found[0][0], found[-1][0]] == ["message_start", "message_stop"]
        deltas = [data["delta"] for kind, data in found if kind == "content_block_delta"]
        text = "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")
        assert text.strip() == turn.get("text", "")
        begun = [data["content_block"] for kind, data in found if kind == "content_block_start"]
        names = [block["name"] for block in begun if block["type"] == "tool_use"]
        arguments = "".join(delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta")
        calls = turn.get("calls", [])
        assert names == [call["name"] for call in calls]
        assert [json.loads(arguments)] == [call["arguments"] for call in calls] if calls else arguments == ""
        (end,) = (data["delta"]["stop_reason"] for kind, data in found if kind == "message_delta")
        assert end == ("tool_use" if calls else "end_turn")
        count = {name: turn["request"][name] for name in ("model", "system", "messages", "tools")}
        url = front.url + "/v1/messages/count_tokens"
        request = urllib.request.Request(url, json.dumps(count).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT) as reply:
            assert json.load(reply)["input_tokens"] > 0
