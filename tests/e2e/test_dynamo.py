"""NVIDIA Dynamo's frontend before real servers: official clients get the answers of the engine."""

import base64
import json
import struct

import anthropic
import openai
import pytest

from paged_client import Client
from paged_client.serving.tritonserver import TritonServer
from tests.support.dynamo import frontend
from tests.support.in_process import byte_tokenizer
from tests.support.processes import needs_server
from tests.support.triton import MODEL, idle, metrics
from tests.support.waiting import WAIT, until

pytestmark = needs_server
PROMPT = "The sea is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 16}
ENDLESS = {"temperature": 0, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
TEXTS = ["The sea is blue.", "A hat."]
TOOL = {
    "type": "object",
    "properties": {"unit": {"enum": ["metre", "foot"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def dynamo(tmp_path_factory):
    # Only with logs as JSON the frontend passes a request's trace on.
    with frontend(tmp_path_factory.mktemp("discovery"), DYN_LOGGING_JSONL="1") as made:
        yield made


@pytest.fixture(scope="module")
def front(dynamo, server):
    """The frontend with a worker of the demo model's first layers."""
    with dynamo.worker(server):
        dynamo.wait_for(MODEL)
        yield dynamo


@pytest.fixture
def client(front):
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=WAIT) as made:
        yield made


@pytest.fixture
def claude(front):
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0, timeout=WAIT) as made:
        yield made


@pytest.fixture
def engine(server):
    with Client(server.grpc_url) as made:
        yield made


@pytest.fixture(scope="module")
def chat(server):
    """What the engine answers to the question."""
    with Client(server.grpc_url) as made:
        return made.generate(messages=QUESTION, **GREEDY, logprobs=3, return_token_ids=True)


def test_models(front, engine):
    models = front.models()
    assert models[MODEL]["context_window"] == engine.model_info().max_model_len


@pytest.mark.parametrize("form", ["text", "token ids"])
@pytest.mark.nightly
def test_completions(client, engine, form):
    expected = engine.generate(PROMPT, **GREEDY, return_token_ids=True)
    prompt = PROMPT if form == "text" else list(expected.prompt_token_ids)
    answer = client.completions.create(model=MODEL, prompt=prompt, **GREEDY)
    assert [(one.text, one.finish_reason) for one in answer.choices] == [(expected.text, expected.finish_reason)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.num_input_tokens, 16)
    parts = list(client.completions.create(model=MODEL, prompt=prompt, stream=True, **GREEDY))
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected.text


def test_chat(client, chat):
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (chat.text, chat.finish_reason)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (chat.num_input_tokens, 16)


def test_streamed_chat(client, chat):
    usage = {"stream_options": {"include_usage": True}}
    parts = list(client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, **usage, **GREEDY))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == chat.text
    (counts,) = (part.usage for part in parts if part.usage)
    assert (counts.prompt_tokens, counts.completion_tokens) == (chat.num_input_tokens, 16)


def test_responses(client, chat):
    wanted = {"model": MODEL, "input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 16}
    answer = client.responses.create(**wanted)
    assert answer.output_text == chat.text
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.num_input_tokens, 16)
    events = list(client.responses.create(**wanted, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == chat.text
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")  # its limit


def test_messages(claude, chat):
    wanted = {"model": MODEL, "messages": QUESTION, "max_tokens": 16, "extra_body": {"temperature": 0}}
    answer = claude.messages.create(**wanted)
    assert ([part.text for part in answer.content], answer.stop_reason) == ([chat.text], "max_tokens")
    assert (answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)) == chat.num_input_tokens
    assert answer.usage.output_tokens == 16
    with claude.messages.stream(**wanted) as stream:
        assert "".join(stream.text_stream) == chat.text
        assert stream.get_final_message().stop_reason == "max_tokens"
    assert claude.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens > 0


@pytest.mark.nightly
def test_several_choices(client, engine):
    wanted = {"temperature": 1, "seed": 3, "n": 3, "max_tokens": 8}
    expected = engine.generate(messages=QUESTION, **wanted)
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, **wanted)
    texts = {choice.index: choice.message.content for choice in answer.choices}
    assert texts == dict(enumerate(sample.text for sample in (expected, *expected.others)))
    counts = [sample.num_output_tokens for sample in (expected, *expected.others)]
    assert answer.usage.completion_tokens == sum(counts)


@pytest.mark.nightly
def test_log_probabilities(client, chat):
    asked = {"logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, **asked, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert [one.logprob for one in content] == pytest.approx([one[0].logprob for one in chat.logprobs], abs=1e-4)
    for found, expected in zip(content, chat.logprobs, strict=True):
        expected = sorted(set(expected), key=lambda entry: entry.rank)[:3]
        assert [one.token for one in found.top_logprobs] == [one.decoded_token for one in expected]
        logprobs = [one.logprob for one in found.top_logprobs]
        assert logprobs == pytest.approx([one.logprob for one in expected], abs=1e-4)


@pytest.mark.nightly
def test_log_probabilities_of_a_completion(client, engine):
    expected = engine.generate(PROMPT, **GREEDY, logprobs=2)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=2, **GREEDY)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx([one[0].logprob for one in expected.logprobs], abs=1e-4)
    assert found.tokens == [one[0].decoded_token for one in expected.logprobs]


@pytest.mark.nightly
def test_stop_strings(client, engine, chat):
    stop = chat.text[len(chat.text) // 2 :][:6]
    expected = engine.generate(messages=QUESTION, stop=[stop], **GREEDY)
    assert stop not in expected.text
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, stop=[stop], **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (expected.text, "stop")


@pytest.mark.nightly
def test_stop_token_ids(client, engine, chat):
    token = chat.token_ids[5]
    expected = engine.generate(messages=QUESTION, stop_token_ids=[token], **GREEDY)
    more = {"extra_body": {"stop_token_ids": [token]}}
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, **more, **GREEDY)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected.text, "stop")


@pytest.mark.nightly
def test_structured_outputs(client):
    schema = {"type": "json_schema", "json_schema": {"name": "size", "schema": TOOL}}
    wanted = {"model": MODEL, "messages": QUESTION, "temperature": 1, "seed": 1, "max_tokens": 200}
    answer = client.chat.completions.create(**wanted, response_format=schema)
    assert json.loads(answer.choices[0].message.content)["unit"] in ("metre", "foot")
    answer = client.chat.completions.create(**wanted, extra_body={"guided_choice": ["tea", "coffee"]})
    assert answer.choices[0].message.content in ("tea", "coffee")


def forced_call(client, model, choice):
    tool = {"type": "function", "function": {"name": "measure", "parameters": TOOL}}
    wanted = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 200}
    (call,) = client.chat.completions.create(**wanted, tools=[tool], tool_choice=choice).choices[0].message.tool_calls
    return call.function.name, json.loads(call.function.arguments)["unit"]


@pytest.mark.nightly
def test_forced_tools(dynamo, client, demo_server):
    """The whole demo model, because a call that the limit cuts is left out."""
    flags = ("--model", MODEL, "--served-model-name", "demo", "--component", "demo")
    with dynamo.worker(demo_server, flags=flags):
        dynamo.wait_for("demo")
        for choice in ("required", {"type": "function", "function": {"name": "measure"}}):
            name, unit = forced_call(client, "demo", choice)
            assert (name, unit in ("metre", "foot")) == ("measure", True)


@pytest.mark.nightly
def test_sampling_parameters_reach_the_engine(client, engine):
    sampling = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.3, "min_tokens": 12}
    common = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "max_tokens": 16}
    common |= {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    expected = engine.generate(PROMPT, **common, **sampling)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, **common, extra_body=sampling)
    assert answer.choices[0].text == expected.text


@pytest.mark.nightly
def test_cache_salts_isolate(client):
    def cached(salt):
        question = [{"role": "user", "content": "Salted: " + "How far away is the moon? " * 4}]
        more = {"extra_body": {"nvext": {"cache_salt": salt}}}
        answer = client.chat.completions.create(model=MODEL, messages=question, **more, **GREEDY)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("one"), cached("one") > 0, cached("two")] == [0, True, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a b c " * 4000}, "max_model_len is"),
        ({"extra_body": {"guided_grammar": "root ::= nothing"}}, "grammar"),
        ({"extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
    ],
    ids=["length", "grammar", "token"],
)
@pytest.mark.nightly
def test_the_engines_errors(client, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(**{"model": MODEL, "prompt": PROMPT, **GREEDY, **fields})


@pytest.mark.nightly
def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=PROMPT)


@pytest.mark.nightly
def test_a_request_ends_when_its_client_leaves(client, server):
    with client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, **ENDLESS) as parts:
        next(iter(parts))
        until(lambda: metrics(server)["paged_requests{running}"] == 1, "the request in the engine")
    idle(server)


@pytest.mark.nightly
def test_adapters_and_traces(dynamo, adapted_server, traces):
    """Each LoRA adapter of the server is a model. The engine's spans have the client's trace as their parent."""
    trace, greedy = "0af7651916cd43dd8448eb211c80fe01", {"temperature": 0, "max_tokens": 12}
    flags = ("--served-model-name", "adapted", "--component", "adapted")
    with dynamo.worker(adapted_server, flags=flags), Client(adapted_server.grpc_url) as engine:
        dynamo.wait_for("adapted", "a", "b")
        with openai.OpenAI(base_url=f"{dynamo.url}/v1", api_key="none", max_retries=0, timeout=WAIT) as client:
            texts = {}
            for name in ("adapted", "a", "b"):
                chosen = {} if name == "adapted" else {"lora_name": name}
                expected = engine.generate(messages=QUESTION, **greedy, **chosen, return_token_ids=True)
                answer = client.chat.completions.create(
                    model=name,
                    messages=QUESTION,
                    extra_headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
                    extra_body={"nvext": {"extra_fields": ["completion_token_ids"]}},
                    **greedy,
                )
                texts[name] = answer.choices[0].message.content
                whole = byte_tokenizer().decode(expected.token_ids, skip_special_tokens=True).rstrip("\ufffd")
                assert texts[name].rstrip("\ufffd") == whole
            assert len(set(texts.values())) == 3
        until(lambda: sum(root.trace_id == trace for root in traces.roots()) == 3, "the spans of the requests")
    until(lambda: not {"adapted", "a", "b"} & dynamo.models().keys(), "the end of the models")


@pytest.mark.nightly
def test_embeddings(dynamo, tmp_path):
    from transformers import BertConfig

    from tests.support.classifiers import SIZES
    from tests.support.encoders import save_encoder

    config = BertConfig(**{name: size for name, size in SIZES.items() if name != "num_key_value_heads"})
    save_encoder(tmp_path / "model", config, {"pooling_mode": "mean"})
    flags = ("--served-model-name", "encoder", "--component", "encoder")
    options = {"dtype": "float32", "device": "cpu"}
    with TritonServer(tmp_path / "model", options, engine_only=True) as server, dynamo.worker(server, flags=flags):
        dynamo.wait_for("encoder")
        with Client(server.grpc_url) as engine:
            expected = [engine.embed(text) for text in TEXTS]
        with openai.OpenAI(base_url=f"{dynamo.url}/v1", api_key="none", max_retries=0, timeout=WAIT) as client:
            answer = client.embeddings.create(model="encoder", input=TEXTS, encoding_format="float")
            for found, one in zip(answer.data, expected, strict=True):
                assert found.embedding == pytest.approx(one.values, abs=1e-5)
            assert answer.usage.prompt_tokens == sum(one.num_input_tokens for one in expected)
            (one,) = client.embeddings.create(model="encoder", input=TEXTS[0], encoding_format="base64").data
            vector = base64.b64decode(one.embedding) if isinstance(one.embedding, str) else None
            found = struct.unpack(f"<{len(vector) // 4}f", vector) if vector else one.embedding
            assert list(found) == pytest.approx(expected[0].values, abs=1e-5)
            with pytest.raises(openai.BadRequestError, match="dimensions"):
                client.embeddings.create(model="encoder", input=TEXTS[0], dimensions=7)
