"""The `openai` package with the gateway and a real server."""

import asyncio
import socket

import openai
import pytest

from paged_client import Client
from tests.support.gateway import gateway
from tests.support.triton import idle, metrics
from tests.support.waiting import WAIT, until

MODEL = "paged_llm"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG = {"temperature": 0, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def front(server):
    with gateway(server.grpc_url, "--api-key", "key") as made:
        yield made


@pytest.fixture(scope="module")
def own_template(server, short_model):
    with gateway(server.grpc_url, "--tokenizer", str(short_model)) as made:
        yield made


@pytest.fixture
def client(front):
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="key", max_retries=0, timeout=WAIT) as made:
        yield made


@pytest.fixture
def engine(server):
    with Client(server.grpc_url) as made:
        yield made


def run(front, scenario):
    """Run `scenario` with an asynchronous client of the gateway and return its result."""

    async def whole():
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="key", max_retries=0) as client:
            return await scenario(client)

    return asyncio.run(asyncio.wait_for(whole(), WAIT))


def test_a_completion_matches_the_engine(client, engine):
    expected = engine.generate("The sea is", temperature=0, max_tokens=24)
    answer = client.completions.create(model=MODEL, prompt="The sea is", temperature=0, max_tokens=24)
    assert [(one.index, one.text, one.finish_reason) for one in answer.choices] == [(0, expected.text, "length")]
    assert answer.usage.prompt_tokens == expected.num_input_tokens
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == expected.num_input_tokens + 24
    assert (answer.object, answer.model) == ("text_completion", MODEL)


def test_a_chat_matches_the_engine(client, engine):
    expected = engine.generate(messages=QUESTION, temperature=0, max_tokens=32)
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert (choice.finish_reason, answer.usage.prompt_tokens) == (expected.finish_reason, expected.num_input_tokens)


def test_the_gateway_template_renders_the_same_prompt(own_template, engine):
    expected = engine.generate(messages=QUESTION, temperature=0, max_tokens=32)

    async def scenario(client):
        return await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)

    answer = run(own_template, scenario)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == expected.num_input_tokens


def test_a_reply_is_part_of_the_next_turn(client):
    """The returned message can be sent back unchanged."""
    first = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=16)
    turns = [*QUESTION, first.choices[0].message, {"role": "user", "content": "And of Spain?"}]
    second = client.chat.completions.create(model=MODEL, messages=turns, temperature=0, max_tokens=16)
    assert second.usage.prompt_tokens > first.usage.total_tokens
    assert second.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_streamed_completion_matches_the_whole(client, include_usage):
    asked = {"model": MODEL, "prompt": "The sea is", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**asked)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = list(client.completions.create(**asked, stream=True, **options))
    last = [chunks.pop()] if include_usage else []
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    for chunk in last:
        assert chunk.choices == []
        assert chunk.usage.total_tokens == whole.usage.total_tokens


def test_a_streamed_chat_matches_the_whole(front):
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 32}

    async def scenario(client):
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        return whole, [chunk async for chunk in stream]

    whole, (*chunks, last) = run(front, scenario)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_two_samples_match_two_seeds(client, engine):
    asked = {"temperature": 1, "max_tokens": 12, "seed": 5, "n": 2}
    expected = [engine.generate("The sea is", temperature=1, max_tokens=12, seed=seed).text for seed in (5, 6)]
    whole = client.completions.create(model=MODEL, prompt="The sea is", **asked)
    assert [choice.text for choice in whole.choices] == expected
    assert expected[0] != expected[1]
    assert whole.usage.completion_tokens == 24
    texts = ["", ""]
    for chunk in client.completions.create(model=MODEL, prompt="The sea is", stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_each_streamed_choice_has_a_role(client):
    roles = [0, 0]
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "seed": 1, "n": 2}
    for chunk in client.chat.completions.create(**asked, stream=True):
        roles[chunk.choices[0].index] += chunk.choices[0].delta.role == "assistant"
    assert roles == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_match_the_engine(client, engine, stream):
    asked = {"temperature": 1.2, "seed": 4, "max_tokens": 12, "n": 2, "logprobs": 2}
    expected = engine.generate("The sea is", **asked)
    answer = client.completions.create(model=MODEL, prompt="The sea is", stream=stream, **asked)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    for index, sample in enumerate((expected, *expected.others)):
        mine = [choice.logprobs for choice in choices if choice.index == index and choice.logprobs]
        assert [text for part in mine for text in part.tokens] == [one.decoded_token for one, *_ in sample.logprobs]
        logprobs = [value for part in mine for value in part.token_logprobs]
        assert logprobs == pytest.approx([one.logprob for one, *_ in sample.logprobs], abs=1e-4)
        top = [one for part in mine for one in part.top_logprobs]
        assert [set(one) for one in top] == [{one.decoded_token for one in entries} for entries in sample.logprobs]
        offsets = [offset for part in mine for offset in part.text_offset]
        ends = [*offsets[1:], len(sample.text)]
        texts = [sample.text[start:end] for start, end in zip(offsets, ends, strict=True)]
        assert texts == [one.decoded_token for one, *_ in sample.logprobs]


@pytest.mark.parametrize("count", [None, 0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_match_the_engine(client, engine, stream, count):
    expected = engine.generate(messages=QUESTION, temperature=1.5, seed=1, max_tokens=12, logprobs=count or 0)
    top = {} if count is None else {"top_logprobs": count}
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 1.5, "seed": 1, "max_tokens": 12}
    answer = client.chat.completions.create(**asked, logprobs=True, **top, stream=stream)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    for token, (chosen, *_), entries in zip(tokens, expected.logprobs, expected.logprobs, strict=True):
        assert token.token == chosen.decoded_token
        assert token.bytes == list(chosen.decoded_token.encode())
        assert token.logprob == pytest.approx(chosen.logprob, abs=1e-4)
        most_likely = {one.decoded_token for one in entries if one.rank <= (count or 0)}
        assert {one.token for one in token.top_logprobs} == most_likely


def test_too_many_logprobs_are_rejected_by_their_openai_name(client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=21)
    assert raised.value.param == "top_logprobs"


def test_the_same_seed_gives_the_same_text(client):
    def text(seed):
        asked = {"model": MODEL, "prompt": "Once", "temperature": 1, "max_tokens": 16}
        return client.completions.create(**asked, seed=seed).choices[0].text

    assert text(3) == text(3) != text(4)


def test_tokenize_and_detokenize(front, engine):
    key = {"Authorization": "Bearer key"}
    expected = engine.generate(messages=QUESTION, max_tokens=1, return_token_ids=True).prompt_token_ids
    status, tokens = front.ask("/tokenize", {"messages": QUESTION}, key)
    assert status == 200, tokens
    assert (status, tokens["tokens"], tokens["count"]) == (200, list(expected), len(expected))
    status, text = front.ask("/detokenize", {"tokens": tokens["tokens"]}, key)
    assert status == 200
    plain = {"prompt": text["prompt"], "add_special_tokens": False}
    assert front.ask("/tokenize", plain, key)[1]["tokens"] == tokens["tokens"]


@pytest.mark.parametrize("many", [False, True])
def test_text_ends_before_the_stop_string(client, many):
    asked = {"model": MODEL, "prompt": "One, two, three, four,", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**asked).choices[0].text
    word = whole.split()[2]
    (choice,) = client.completions.create(**asked, stop=["zebra", word] if many else word).choices
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(word)], "stop")


def test_penalties_and_filters_reach_the_engine(client, engine):
    sampling = {"temperature": 1, "seed": 2, "top_p": 0.9, "frequency_penalty": 1.5, "presence_penalty": 0.5}
    more = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
    expected = engine.generate("The sea is", max_tokens=24, **sampling, **more)
    asked = {"model": MODEL, "prompt": "The sea is", "max_tokens": 24}
    assert client.completions.create(**asked, **sampling, extra_body=more).choices[0].text == expected.text


def test_text_and_token_id_prompts_are_equivalent(client, engine):
    prompts = ["The sea is", "Once upon a time"]
    expected = [engine.generate(prompt, max_tokens=1, return_token_ids=True) for prompt in prompts]
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    alone = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts]
    together = client.completions.create(prompt=prompts, n=2, **asked)
    assert [choice.text for choice in together.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    ids = client.completions.create(prompt=[list(one.prompt_token_ids) for one in expected], **asked)
    assert [choice.text for choice in ids.choices] == alone
    assert ids.usage.prompt_tokens == sum(one.num_input_tokens for one in expected)
    assert ids.usage.completion_tokens == 24


@pytest.mark.parametrize("stream", [False, True])
def test_return_token_ids(client, engine, stream):
    asked = {"temperature": 0, "max_tokens": 8}
    expected = engine.generate("The sea is", return_token_ids=True, **asked)
    more = {"extra_body": {"return_token_ids": True}}
    answer = client.completions.create(model=MODEL, prompt="The sea is", stream=stream, **asked, **more)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    assert [token for choice in choices for token in choice.token_ids] == list(expected.token_ids)


def named(choice, ids):
    """Check that the tokens of a completion's log probabilities are named by their ids."""
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in ids]
    assert all(
        name in top for name, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True) if top
    )


def test_tokens_are_named_by_their_ids(client, engine):
    """Not only those of the output: RL trainers compare the ids of an echoed prompt."""
    asked = {"temperature": 0, "max_tokens": 5}
    expected = engine.generate("The sea is", return_token_ids=True, **asked)
    more = {"extra_body": {"return_tokens_as_token_ids": True}}
    (choice,) = client.completions.create(model=MODEL, prompt="The sea is", logprobs=1, **asked, **more).choices
    assert choice.text == expected.text and not hasattr(choice, "token_ids")
    named(choice, expected.token_ids)
    more["extra_body"]["prompt_logprobs"] = 3
    echoed = {"echo": True, "logprobs": 1}
    (choice,) = client.completions.create(model=MODEL, prompt="The sea is", **echoed, **asked, **more).choices
    named(choice, [*expected.prompt_token_ids, *expected.token_ids])
    assert {len(top) for top in choice.logprobs.top_logprobs if top} <= {1, 2}
    assert {len(top) for top in choice.prompt_logprobs if top} <= {3, 4}
    del more["extra_body"]["prompt_logprobs"]
    chunks = client.chat.completions.create(
        model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=2, max_tokens=3, stream=True, **more
    )
    tokens = [one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content]
    names = [entry.token for one in tokens for entry in (one, *one.top_logprobs)]
    assert len(names) == 9 and all(name.startswith("token_id:") for name in names)


def test_prompt_logprobs_match_vllm(client, engine):
    expected = engine.generate("The sea is", max_tokens=0, prompt_logprobs=1).prompt_logprobs
    more = {"extra_body": {"prompt_logprobs": 1, "return_token_ids": True}}
    whole = client.completions.create(model=MODEL, prompt=["The sea is"], max_tokens=0, **more)
    (choice,) = whole.choices
    assert (choice.text, whole.usage.completion_tokens) == ("", 0)
    assert len(choice.prompt_token_ids) == len(expected) == whole.usage.prompt_tokens
    first, *others = choice.prompt_logprobs
    assert first is None
    for found, entries, token in zip(others, expected[1:], choice.prompt_token_ids[1:], strict=True):
        assert list(found) == [str(one.token_id) for one in entries]
        assert [one["rank"] for one in found.values()] == [one.rank for one in entries]
        assert found[str(token)]["logprob"] == pytest.approx(entries[0].logprob, abs=1e-4)
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1, **more)
    assert len(chat.prompt_logprobs) == len(chat.prompt_token_ids) == chat.usage.prompt_tokens
    first, *others = client.completions.create(model=MODEL, prompt="The sea is", max_tokens=4, stream=True, **more)
    assert first.choices[0].prompt_token_ids == choice.prompt_token_ids
    assert [one and set(one) for one in first.choices[0].prompt_logprobs] == [
        one and set(one) for one in choice.prompt_logprobs
    ]
    assert not any(hasattr(chunk.choices[0], "prompt_token_ids") for chunk in others)
    first, *_ = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1, stream=True, **more)
    assert first.prompt_token_ids == chat.prompt_token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_echo_prepends_the_prompt(client, stream):
    asked = {"model": MODEL, "prompt": "The sea is", "temperature": 0, "max_tokens": 6}
    plain = client.completions.create(**asked).choices[0].text
    answer = client.completions.create(**asked, echo=True, stream=stream)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "The sea is" + plain


@pytest.mark.parametrize("length", [0, 4])
def test_scoring_a_text_like_evaluation_harnesses(client, engine, length):
    """Prompt and output tokens have their text, offset and logprob."""
    text, sampling = "The sea is blue", {"max_tokens": length, "temperature": 0}
    expected = engine.generate(text, prompt_logprobs=1, logprobs=1, **sampling)
    prompts = [text, "Once"]
    answer = client.completions.create(model=MODEL, prompt=prompts, echo=True, logprobs=1, **sampling)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        logprobs = choice.logprobs
        assert choice.text.startswith(prompt)
        ends = [*logprobs.text_offset[1:], len(choice.text)]
        assert logprobs.tokens == [
            choice.text[start:end] for start, end in zip(logprobs.text_offset, ends, strict=True)
        ]
        assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    entries = [*expected.prompt_logprobs[1:], *(expected.logprobs or ())]
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[1:] == pytest.approx([one.logprob for one, *_ in entries], abs=1e-4)
    assert [set(one) for one in logprobs.top_logprobs[1:]] == [{one.decoded_token for one in each} for each in entries]


def test_the_text_of_a_leading_special_token_is_returned(client):
    """The prompt text itself does not contain the special token."""
    begin, word, end = 1, 504, 2
    asked = {"model": MODEL, "prompt": [begin, word, end], "max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = client.completions.create(**asked).choices
    assert (choice.text, choice.logprobs.tokens) == ("The", ["<|im_start|>", "The", "<|im_end|>"])
    assert choice.logprobs.text_offset == [0, 0, 3]


def test_logit_bias_selects_the_token(client, engine):
    (word,) = engine.generate("The sea is", max_tokens=1, temperature=0, return_token_ids=True).token_ids
    asked = {"model": MODEL, "prompt": "The sea is", "max_tokens": 1, "temperature": 0}
    first = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, logit_bias={str(word): -100}).choices[0].text != first
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(**asked, logit_bias={str(word): -101})
    assert raised.value.param == "logit_bias"


def test_best_of_returns_the_most_likely_sample(client, engine):
    asked = {"temperature": 1.5, "seed": 1, "max_tokens": 8}
    expected = engine.generate("The sea is", best_of=4, **asked).text
    (choice,) = client.completions.create(model=MODEL, prompt="The sea is", best_of=4, **asked).choices
    assert choice.text == expected


def test_a_timeout_returns_partial_output_over_openai(client):
    more = {"extra_body": {"timeout_ms": 1, "ignore_eos": True}}
    (choice,) = client.completions.create(model=MODEL, prompt="Once", max_tokens=500, **more).choices
    assert (choice.finish_reason, choice.stop_reason) == ("length", "timeout")


def test_tools_and_tool_results_use_the_chat_template(client):
    """The demo model's template ignores tools."""
    call = {"id": "c1", "type": "function", "function": {"name": "capital", "arguments": '{"of": "France"}'}}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Paris"},
    ]
    tools = [{"type": "function", "function": {"name": "capital"}}]
    answer = client.chat.completions.create(model=MODEL, messages=turns, tools=tools, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_models_endpoint(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("sampling", "param"), [({"max_tokens": 0}, "max_tokens"), ({"top_p": 2}, "top_p"), ({"n": 1000}, "n")]
)
def test_a_request_rejected_by_the_engine_is_a_bad_request(client, sampling, param, stream):
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=MODEL, prompt="x", stream=stream, **sampling)
    assert raised.value.param == param
    assert raised.value.body["message"].startswith(f"{param}=")
    assert (raised.value.type, raised.value.code) == ("invalid_request_error", "invalid_argument")


def test_errors_for_an_unknown_model_and_a_wrong_key(client, front):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="other", max_retries=0).models.list()


def test_health_endpoint(front):
    assert front.ask("/health") == (200, {"status": "ok"})


def test_closing_a_stream_cancels_the_request(front, client, server):
    before = metrics(server)["paged_requests_finished_total{cancelled}"]
    stream = client.completions.create(model=MODEL, prompt="Once", stream=True, **LONG)
    assert next(stream).choices[0].text
    assert front.metrics()["paged_openai_open_streams"] == 1
    stream.close()
    idle(server)
    assert metrics(server)["paged_requests_finished_total{cancelled}"] == before + 1
    until(lambda: front.metrics()["paged_openai_open_streams"] == 0, "the end of the stream")


def test_disconnecting_from_a_non_streaming_call_cancels_the_request(front, server):
    before = metrics(server)["paged_requests_finished_total{cancelled}"]

    async def scenario(client):
        lost = asyncio.create_task(client.completions.create(model=MODEL, prompt="Once", **LONG))
        await asyncio.to_thread(until, lambda: metrics(server)["paged_requests{running}"] == 1, "the request")
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        return lost.cancelled()

    assert run(front, scenario)
    idle(server)
    assert metrics(server)["paged_requests_finished_total{cancelled}"] == before + 1
    gone = 'paged_openai_requests_total{model="paged_llm",route="/v1/completions",status="499"}'
    until(lambda: front.metrics().get(gone) == 1, "the count of the request")


def test_many_async_clients_are_served_concurrently(front, engine):
    expected = engine.generate("The sea is", temperature=0, max_tokens=8).text

    async def scenario(client):
        asked = {"model": MODEL, "prompt": "The sea is", "temperature": 0, "max_tokens": 8}
        return await asyncio.gather(*(client.completions.create(**asked) for _ in range(16)))

    assert {answer.choices[0].text for answer in run(front, scenario)} == {expected}


def test_a_stream_ends_with_the_done_event(front):
    """OpenAI's specification requires it; the package hides it."""
    body = b'{"model": "paged_llm", "prompt": "Once", "max_tokens": 2, "stream": true}'
    head = f"POST /v1/completions HTTP/1.0\r\nAuthorization: Bearer key\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", front.port), WAIT) as connection:
        connection.sendall(head.encode() + body)
        with connection.makefile("rb") as reply:
            text = reply.read().decode()
    assert "content-type: text/event-stream" in text.lower()
    assert text.endswith("data: [DONE]\n\n")
