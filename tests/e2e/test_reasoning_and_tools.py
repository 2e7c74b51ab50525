"""Reasoning and tool calls through a real server, with its own clients and with the OpenAI gateway."""

import json

import openai
import pytest
from transformers import AutoTokenizer

from paged_client import Client, PagedError
from paged_client.serving.tritonserver import TritonServer
from tests.support.gateway import gateway
from tests.support.scripted_model import save_scripted, selector
from tests.support.triton import MODEL, ONE_AT_A_TIME, post, raw_stream
from tests.support.waiting import WAIT

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' }}{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FUNCTION = {"name": "get_weather", "arguments": {"city": "Zürich"}}
REASONING, ANSWER = "The user asks about Zürich.\nI need the tool — let me call it.", "One moment, please."
CALL = f"<tool_call>\n{json.dumps(FUNCTION, ensure_ascii=False)}\n</tool_call>"
WHOLE = f"<think>\n{REASONING}\n</think>\n\n{ANSWER}\n{CALL}"
SUM = "2 and 2 is 4."
SCRIPTS = {"weather": WHOLE, "sum": f"<think>\n{SUM}\n</think>\n\n4", "plain": "Hello there."}
CALLS = [{"type": "function", "function": FUNCTION}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
MAX_TOKENS = 300
ASKED = {"return_reasoning_content": True, "return_tool_calls": True}
WEATHER = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scripted")
    save_scripted(directory, SCRIPTS, chat_template=TEMPLATE, special=("<think>", "</think>"))
    options = {"dtype": "float32", "num_gpu_blocks_override": 256, "max_num_seqs": 8, "first_response_ms": -1}
    with TritonServer(directory, options, engine_only=True, server_args=[ONE_AT_A_TIME]) as running:
        running.tokenizer = AutoTokenizer.from_pretrained(directory)
        yield running


@pytest.fixture
def ask(scripted):
    """A function that sends a request and returns its completion."""
    with Client(scripted.grpc_url) as client:
        yield lambda prompt=None, **options: client.generate(prompt, **({"max_tokens": MAX_TOKENS} | options))


@pytest.fixture(scope="module")
def front(scripted):
    with gateway(scripted.grpc_url) as made:
        yield made


@pytest.fixture
def openai_client(front):
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=WAIT) as made:
        yield made


def parts(completion):
    return completion.text, completion.reasoning_content, completion.tool_calls


def test_the_outputs_of_the_generate_endpoint(scripted):
    status, body = post(scripted, {"messages": json.dumps(WEATHER), "max_tokens": MAX_TOKENS, **ASKED})
    answer = json.loads(body)
    assert (status, answer["text_output"], answer["reasoning_content"]) == (200, ANSWER, REASONING)
    assert json.loads(answer["tool_calls"]) == CALLS
    status, body = post(
        scripted, {"messages": json.dumps(WEATHER), "max_tokens": MAX_TOKENS, "skip_special_tokens": False}
    )
    answer = json.loads(body)
    assert (status, answer["text_output"]) == (200, WHOLE)
    assert not answer.keys() & {"reasoning_content", "tool_calls"}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_stream_has_parts_of_reasoning_then_of_text_and_whole_calls(scripted, protocol):
    url = {"grpc": scripted.grpc_url, "http": scripted.http_url}[protocol]
    with (
        Client(url, protocol=protocol) as client,
        client.stream(messages=WEATHER, max_tokens=MAX_TOKENS, **ASKED) as stream,
    ):
        deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == ANSWER
    assert "".join(delta.reasoning_content for delta in deltas) == REASONING
    assert [call for delta in deltas for call in delta.tool_calls] == CALLS
    first_text = next(index for index, delta in enumerate(deltas) if delta.text)
    assert not any(delta.reasoning_content for delta in deltas[first_text + 1 :])
    assert sum(bool(delta.reasoning_content) for delta in deltas) > 1
    assert parts(stream.completion) == (ANSWER, REASONING, tuple(CALLS))


def test_only_what_was_asked_for_is_taken_out_of_the_text(ask):
    assert parts(ask(messages=WEATHER, return_reasoning_content=True)) == (f"{ANSWER}\n{CALL}", REASONING, None)
    whole = f"\n{REASONING}\n\n\n{ANSWER}"  # without special tokens, as in other requests
    assert parts(ask(messages=WEATHER, return_tool_calls=True)) == (whole, None, tuple(CALLS))


def test_each_sample_has_its_parts(ask):
    first = ask(messages=WEATHER, n=2, temperature=1.0, **ASKED)
    assert [parts(one) for one in (first, *first.others)] == [(ANSWER, REASONING, tuple(CALLS))] * 2
    assert parts(ask(messages=WEATHER, beam_width=2, **ASKED)) == (ANSWER, REASONING, tuple(CALLS))


def test_a_prompt_of_text_or_of_token_ids(scripted, ask):
    prompt = f"Go on. <think>\n{selector('sum')}"
    answers = [ask(prompt, **ASKED), ask(scripted.tokenizer.encode(prompt), **ASKED)]
    # The prompt opens the reasoning, and the script does so again.
    assert [parts(answer) for answer in answers] == [("4", f"<think>\n{SUM}", ())] * 2
    prompt = f"Go on. {selector('sum')}"
    status, body = post(
        scripted, {"text_input": prompt, "max_tokens": MAX_TOKENS, **ASKED}
    )  # which by default returns the prompt, too
    assert (status, json.loads(body)["text_output"]) == (200, f"{prompt}4")


def test_an_output_without_marks(ask):
    assert parts(ask(messages=[{"role": "user", "content": "plain"}], **ASKED)) == ("Hello there.", "", ())


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_is_cut(scripted, stream):
    inputs = {"messages": WEATHER, "stream": stream, "return_finish_reason": True, **ASKED}
    with raw_stream(scripted) as raw:
        raw.send(**inputs, sampling_parameters={"max_tokens": 8})
        reasoning = raw.all()
        raw.send(**inputs, sampling_parameters={"max_tokens": MAX_TOKENS, "stop": ["moment"]})
        stopped = raw.all()
        raw.send(**inputs, sampling_parameters={"max_tokens": MAX_TOKENS, "stop": ['Zürich"}']})
        call = raw.all()
    assert REASONING.startswith(cut := _joined(reasoning, "reasoning_content"))
    assert cut
    assert [_joined(reasoning, name) for name in ("text_output", "tool_calls")] == ["", "[]" * len(reasoning)]
    assert reasoning[-1].outputs["finish_reason"] == [b"length"]
    assert [_joined(stopped, name) for name in ("text_output", "reasoning_content")] == ["One ", REASONING]
    assert _joined(call, "text_output") == f"{ANSWER}\n{CALL[: CALL.index('Zürich')]}"
    assert call[-1].outputs["finish_reason"] == [b"stop"]


def _joined(responses, name):
    return b"".join(response.outputs[name][0] for response in responses if name in response.outputs).decode()


def test_a_constrained_output_does_not_continue_the_reasoning_of_its_prompt(ask):
    assert parts(ask("Go on. <think>\n", choice=["yes"], **ASKED)) == ("yes", "", ())


def test_an_answer_can_be_sent_back_as_a_message(scripted, ask):
    answer = ask(messages=WEATHER, **ASKED)
    turn = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning_content}
    turns = [*WEATHER, turn | {"tool_calls": answer.tool_calls}, {"role": "tool", "content": "The sum is next."}]
    second = ask(messages=turns, return_token_ids=True, **ASKED)
    assert WHOLE in scripted.tokenizer.decode(second.prompt_token_ids)
    assert parts(second) == ("4", SUM, ())


def test_a_session_keeps_the_parts_of_an_answer(scripted, ask):
    ask(messages=WEATHER, sequence_id=5, sequence_start=True, **ASKED)
    result = [{"role": "tool", "content": "The sum is next."}]
    second = ask(messages=result, sequence_id=5, sequence_end=True, return_token_ids=True, **ASKED)
    prompt = scripted.tokenizer.decode(second.prompt_token_ids)
    assert WHOLE in prompt
    assert prompt.count("<think>") == 1
    assert parts(second) == ("4", SUM, ())


def test_a_long_conversation(ask):
    """It is read in the background."""
    tools = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"description": "x" * 5000}}]
    assert parts(ask(messages=WEATHER, tools=tools, **ASKED)) == (ANSWER, REASONING, tuple(CALLS))


def test_requests_that_make_no_sense(ask):
    with pytest.raises(PagedError, match="return_text_offsets=true: has no effect with return_reasoning_content"):
        ask(messages=WEATHER, return_reasoning_content=True, return_text_offsets=True)


def test_a_model_without_marks(tiny_server):
    with Client(tiny_server.grpc_url) as client:
        plain = client.generate("The sea", temperature=0)
        assert parts(client.generate("The sea", temperature=0, return_reasoning_content=True)) == (plain.text, "", None)
        with pytest.raises(PagedError, match="return_tool_calls=true: the tokenizer has no response_template"):
            client.generate("The sea", return_tool_calls=True)


def test_the_gateway_returns_reasoning_and_calls(openai_client):
    answer = openai_client.chat.completions.create(model=MODEL, messages=WEATHER, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.message.reasoning_content == REASONING
    assert choice.message.content.strip() == ANSWER
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == tuple(FUNCTION.values())
    assert choice.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "The sum is next."}
    second = openai_client.chat.completions.create(model=MODEL, messages=[*WEATHER, choice.message, result])
    assert (second.choices[0].message.reasoning_content, second.choices[0].message.content) == (SUM, "4")
    less = [*WEATHER, choice.message.model_copy(update={"reasoning_content": None}), result]
    third = openai_client.chat.completions.create(model=MODEL, messages=less)
    assert third.usage.prompt_tokens < second.usage.prompt_tokens


def test_the_gateway_streams_reasoning(openai_client):
    chunks = list(openai_client.chat.completions.create(model=MODEL, messages=WEATHER, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasoning = [getattr(delta, "reasoning_content", None) for delta in deltas]
    assert "".join(filter(None, reasoning)) == REASONING
    assert sum(map(bool, reasoning)) > 1
    assert "".join(delta.content or "" for delta in deltas).strip() == ANSWER
    arguments = [call.function.arguments for delta in deltas for call in delta.tool_calls or ()]
    assert json.loads("".join(arguments)) == FUNCTION["arguments"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_gateway_leaves_reasoning_out_on_request(front, stream):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "sum"}], "include_reasoning": False}
    if stream:
        chunks = front.events("/v1/chat/completions", body | {"stream": True})
        messages = [chunk["choices"][0]["delta"] for chunk in chunks]
    else:
        messages = [front.ask("/v1/chat/completions", body)[1]["choices"][0]["message"]]
    assert "".join(message.get("content", "") for message in messages) == "4"
    assert not any("reasoning_content" in message for message in messages)
