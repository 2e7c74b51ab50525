"""Tests of the client library: requests, responses, and how requests end."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from client import (
    Adapter,
    AsyncClient,
    Client,
    Completion,
    Delta,
    Embedding,
    PagedError,
    PoolMap,
    TokenLogprob,
    grpc_wire,
    http_wire,
    sync_client,
)
from client.async_http import HttpResponses
from client.wire import Transcript, request_values
from tests.support.fake_servers import SERVERS, WAIT, grpc_inputs, grpc_response

NINE = {"logprob": -0.25, "rank": 1, "decoded_token": "b"}
EVENTS = 'data: {"a": 1}\n\ndata: {"b": "é"}\n\n'.encode()


def test_importing_the_client_imports_no_transport():
    code = "import sys, client; print({'grpc', 'aiohttp', 'numpy', 'tritonclient'} & sys.modules.keys())"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


class TestErrors:
    @pytest.mark.parametrize(
        ("text", "code", "message"),
        [
            ("INVALID_ARGUMENT: seed=-1: must be 0..9", "INVALID_ARGUMENT", "seed=-1: must be 0..9"),
            ("UNAVAILABLE: full", "UNAVAILABLE", "full"),
            ("Error generating stream: UNAVAILABLE: full", "UNAVAILABLE", "full"),
            ("Error generating stream: of another backend", "UNKNOWN", "of another backend"),
            ("LoRA feature is not enabled.", "INVALID_ARGUMENT", "LoRA feature is not enabled."),
            (
                "LoRA c is not supported, we currently support ['a', 'b']",
                "INVALID_ARGUMENT",
                "LoRA c is not supported, we currently support ['a', 'b']",
            ),
            (
                "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
                "INVALID_ARGUMENT",
                "When streaming, `exclude_input_in_output` = False is not allowed.",
            ),
            ("INTERNAL: two\nlines", "INTERNAL", "two\nlines"),
            ("Request for unknown model: 'x'", "UNKNOWN", "Request for unknown model: 'x'"),
            ("max_tokens: A: B", "UNKNOWN", "max_tokens: A: B"),
            ("", "UNKNOWN", ""),
        ],
    )
    def test_error_class_and_message_are_parsed(self, text, code, message):
        error = PagedError.parse(text)
        assert (error.code, error.message) == (code, message)
        assert str(error) == f"{code}: {message}"

    def test_message_without_class_gets_the_transport_code(self):
        assert PagedError.parse("gone", "UNAVAILABLE").code == "UNAVAILABLE"
        assert PagedError.parse("INTERNAL: gone", "UNAVAILABLE").code == "INTERNAL"

    @pytest.mark.parametrize(
        ("status", "body", "code", "message"),
        [
            (400, b'{"error":"INVALID_ARGUMENT: no"}', "INVALID_ARGUMENT", "no"),
            (400, b'data: {"error":"CANCELLED: no"}\n\n', "CANCELLED", "no"),
            (400, b'{"error":"no class"}', "UNKNOWN", "no class"),
            (404, b'{"error":"no model"}', "NOT_FOUND", "no model"),
            (503, b"<html>busy</html>", "UNAVAILABLE", "HTTP 503 why <html>busy</html>"),
            (500, b"", "UNKNOWN", "HTTP 500 why"),
            (400, b'["no object"]', "UNKNOWN", 'HTTP 400 why ["no object"]'),
        ],
    )
    def test_http_replies(self, status, body, code, message):
        error = http_wire.http_error(status, "why", body)
        assert (error.code, error.message) == (code, message)


class TestRequest:
    def test_inputs(self):
        values = request_values("hé", None, {"max_tokens": 3, "stop": ["\n"]}, stream=True)
        assert json.loads(values.pop("sampling_parameters")) == {"max_tokens": 3, "stop": ["\n"]}
        assert values == {
            "text_input": "hé",
            "stream": True,
            "exclude_input_in_output": True,
            "return_finish_reason": True,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
            "return_receipt": True,
        }

    @pytest.mark.parametrize(("count", "asks"), [(0, True), (5, True), (None, False)])
    def test_logprobs_parameter_sets_the_return_flags(self, count, asks):
        values = request_values("hé", None, {"logprobs": count}, stream=True)
        names = ("return_logprobs", "return_cumulative_logprob")
        assert [values.get(name, False) for name in names] == [asks, asks]

    def test_messages_replace_the_prompt(self):
        messages = [{"role": "user", "content": "hé"}]
        values = request_values(None, messages, {}, stream=False)
        assert json.loads(values["messages"]) == messages
        assert "text_input" not in values

    @pytest.mark.parametrize(
        ("prompt", "messages", "sampling", "named"),
        [
            (None, None, {}, "exactly one of prompt and messages"),
            ("a", [], {}, "exactly one of prompt and messages"),
            (5, None, {}, "prompt=5: must be a string, or a list of token ids"),
            ([1, "2"], None, {}, "prompt=.*must be a string, or a list of token ids"),
            ([-1], None, {}, "prompt: token ids must be in 0"),
            ("a", None, {"return_token_ids": 1}, "return_token_ids=1: must be True or False"),
            ("a\ud800", None, {}, "prompt: character 1"),
            (None, [{"role": "user", "content": "\ud800"}], {}, "messages: character"),
            (None, [{1, 2}], {}, "messages=.*not JSON"),
            ("a", None, {"seed": object()}, "seed=.*not JSON"),
            ("a", None, {"stop": "\ud800"}, "stop: character"),
        ],
    )
    def test_invalid_arguments_are_rejected(self, prompt, messages, sampling, named):
        with pytest.raises(ValueError, match=named):
            request_values(prompt, messages, sampling, stream=True)

    @pytest.mark.parametrize("prompt", ["hé\0", [5, 2**31 - 1]])
    def test_both_protocols_encode_the_same_values(self, prompt):
        values = request_values(prompt, None, {"stop": "é", "return_token_ids": True}, stream=True)
        request = grpc_wire.infer_request("m", values, "id-1")
        assert (request.model_name, request.id) == ("m", "id-1")
        assert grpc_inputs(request) == values
        assert json.loads(http_wire.encode_body(values, "id-1")) == {"id": "id-1", **values}
        assert "id" not in json.loads(http_wire.encode_body(values, ""))


class TestResponse:
    def test_fields_of_a_grpc_response(self):
        outputs = {"text_output": "é", "finish_reason": "None", "num_input_tokens": 4, "num_output_tokens": 2}
        outputs |= {"logprobs": "null", "cumulative_logprob": -0.5}
        response = service_pb2.ModelStreamInferResponse(infer_response=grpc_response(outputs))
        assert grpc_wire.read_fields(response) == {name: [value] for name, value in outputs.items()}

    def test_scalar_token_count_is_accepted(self):
        response = grpc_response({"text_output": "a", "num_input_tokens": 4})
        del response.outputs[1].shape[:]
        message = service_pb2.ModelStreamInferResponse(infer_response=response)
        assert grpc_wire.read_fields(message) == {"text_output": ["a"], "num_input_tokens": [4]}

    @pytest.mark.parametrize(
        "data",
        [
            '{"text_output":"a","num_output_tokens":2,"model_name":"m"}',
            '{"text_output":["a"],"num_output_tokens":[2]}',
        ],
    )
    def test_fields_of_an_event(self, data):
        assert http_wire.read_fields(data) == {"text_output": ["a"], "num_output_tokens": [2]}

    @pytest.mark.parametrize("data", ["", "[]", '{"text'])
    def test_event_that_is_not_an_object_is_an_internal_error(self, data):
        with pytest.raises(PagedError) as raised:
            http_wire.read_fields(data)
        assert raised.value.code == "INTERNAL"

    def test_deltas_are_concatenated_to_a_completion(self):
        transcript = Transcript()
        first = {"text_output": ["a"], "finish_reason": ["None"], "num_input_tokens": [3], "num_output_tokens": [2]}
        assert transcript.add(first) == [Delta("a", 2, None)]
        assert transcript.completion() == Completion("a", "cancelled", 3, 2)
        last = {"text_output": ["b"], "finish_reason": ["length"], "num_output_tokens": [1]}
        assert transcript.add(last) == [Delta("b", 1, "length")]
        assert transcript.completion() == Completion("ab", "length", 3, 3)

    def test_samples_are_separate_and_finish_independently(self):
        transcript = Transcript()
        first = {"text_output": ["a", ""], "finish_reason": ["None", "None"], "num_output_tokens": [1, 0]}
        assert transcript.add(first | {"num_input_tokens": [3]}) == [Delta("a", 1, None, 0)]
        second = {"text_output": ["", "c"], "finish_reason": ["None", "stop"], "num_output_tokens": [0, 2]}
        assert transcript.add(second) == [Delta("c", 2, "stop", 1)]
        assert not transcript.complete
        last = {"text_output": ["b", ""], "finish_reason": ["length", "stop"], "num_output_tokens": [1, 0]}
        assert transcript.add(last) == [Delta("b", 1, "length", 0)]
        assert transcript.complete
        assert transcript.completion() == Completion("ab", "length", 3, 2, (Completion("c", "stop", 3, 2),))

    @pytest.mark.parametrize("n", [1, 2])
    def test_prompt_fields_may_arrive_in_several_responses(self, n):
        """The log probabilities of a slow prompt arrive after an empty response with the other fields."""
        transcript = Transcript()
        empty = {"text_output": [""] * n, "finish_reason": ["None"] * n, "num_output_tokens": [0] * n}
        last = {"text_output": ["a"] * n, "finish_reason": ["stop"] * n, "num_output_tokens": [1] * n}
        deltas = transcript.add(empty | {"prompt_token_ids": [5], "first_prompt_token": ["x"]})
        deltas += transcript.add(last | {"prompt_logprobs": ["[null]"]})
        whole = transcript.completion()
        assert (whole.prompt_token_ids, whole.first_prompt_token, whole.prompt_logprobs) == ((5,), "x", (None,))
        assert [one.prompt_token_ids for one in deltas if one.prompt_token_ids] == [(5,)]
        assert [one.prompt_logprobs for one in deltas if one.prompt_logprobs] == [(None,)]

    def test_logprobs_of_deltas_are_concatenated(self):
        transcript = Transcript()
        entries = [{"7": {"logprob": -1.5, "rank": 2, "decoded_token": "a"}, "9": NINE}, {"9": NINE}]
        counts = {"num_output_tokens": [1], "finish_reason": ["None"]}
        parts = [
            counts | {"text_output": ["a"], "logprobs": [json.dumps(entries[:1])], "cumulative_logprob": [-1.5]},
            counts | {"text_output": ["b"], "logprobs": [json.dumps(entries[1:])], "cumulative_logprob": [-1.75]},
        ]
        (first,), (second,) = map(transcript.add, parts)
        seven, nine = TokenLogprob(7, -1.5, 2, "a"), TokenLogprob(9, -0.25, 1, "b")
        assert (first.logprobs, first.cumulative_logprob) == (((seven, nine),), -1.5)
        assert (second.logprobs, second.cumulative_logprob) == (((nine,),), -1.75)
        whole = transcript.completion()
        assert (whole.logprobs, whole.cumulative_logprob) == (((seven, nine), (nine,)), -1.75)

    def test_token_ids_and_offsets_are_split_by_token_counts(self):
        transcript = Transcript()
        said = {"text_output": ["ab", "c"], "num_output_tokens": [2, 1], "num_input_tokens": [2]}
        first = transcript.add({**said, "token_ids": [4, 5, 6], "text_offsets": [0, 1, 0], "prompt_token_ids": [1, 2]})
        assert [(delta.token_ids, delta.text_offsets) for delta in first] == [((4, 5), (0, 1)), ((6,), (0,))]
        assert [delta.prompt_token_ids for delta in first] == [(1, 2), None]
        last = {"text_output": ["", ""], "num_output_tokens": [0, 1], "finish_reason": ["stop", "stop"]}
        transcript.add({**last, "token_ids": [7], "text_offsets": [1]})
        whole = transcript.completion()
        assert (whole.token_ids, whole.text_offsets, whole.prompt_token_ids) == ((4, 5), (0, 1), (1, 2))
        assert (whole.others[0].token_ids, whole.others[0].text_offsets) == ((6, 7), (0, 1))

    def test_fields_that_were_not_requested_are_none(self):
        transcript = Transcript()
        (delta,) = transcript.add({"text_output": ["a"], "logprobs": ["null"], "num_output_tokens": [1]})
        assert (delta.logprobs, delta.cumulative_logprob) == (None, None)
        assert (transcript.completion().logprobs, transcript.completion().cumulative_logprob) == (None, None)


class TestEvents:
    @pytest.mark.parametrize("cut", range(len(EVENTS) + 1))
    def test_event_stream_may_be_split_anywhere(self, cut):
        parser = http_wire.EventParser()
        assert parser.feed(EVENTS[:cut]) + parser.feed(EVENTS[cut:]) == ['{"a": 1}', '{"b": "é"}']

    def test_line_endings_comments_and_other_fields(self):
        parser = http_wire.EventParser()
        assert parser.feed(b": hi\r\nevent: x\r\ndata:1\r\ndata: 2\r\n\r\n\r\n\n") == ["1\n2"]

    def test_incomplete_event_is_not_returned(self):
        assert http_wire.EventParser().feed(b"data: 1\n") == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("https://host/prefix", "https://host/prefix"),
    ],
)
def test_http_urls(url, expected):
    assert http_wire.generate_url(url, "a b/c") == f"{expected}/v2/models/a%20b%2Fc/generate_stream"


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"protocol": "tcp"}, "protocol='tcp'"),
        ({"url": "http://localhost:8001"}, "url='http://localhost:8001'"),
        ({"url": "ftp://localhost", "protocol": "http"}, "url='ftp://localhost'"),
    ],
)
def test_invalid_url_is_rejected(client, arguments, named):
    with pytest.raises(ValueError, match=named):
        client(**arguments)


@pytest.fixture(params=SERVERS)
def protocol(request):
    return request.param


@pytest.fixture
def fake(protocol):
    with SERVERS[protocol]() as seen:
        yield seen


@pytest.fixture
def client(fake, protocol):
    with Client(fake.url, protocol=protocol) as made:
        yield made


def texts(stream):
    return [delta.text for delta in stream]


async def async_texts(stream):
    return [delta.text async for delta in stream]


def pool_of(states, **others):
    """Return a pool map as a server sends it."""
    values = {"time": 12.5, "block_size": 16, "running": 1, "waiting": 2, "tokens": 20, "preemptions": 4}
    return values | {"num_blocks": len(states), "states": states, "cached_tokens_hit": 3} | others


NO_MAPS = [
    ("[]", "INTERNAL"),
    ("{}", "INTERNAL"),
    ("{", "INTERNAL"),
    (json.dumps(pool_of("12", num_blocks=3)), "INTERNAL"),
    (json.dumps(pool_of("1x")), "INTERNAL"),
    (json.dumps(pool_of("")), "INTERNAL"),
    ("UNAVAILABLE: the engine has stopped", "UNAVAILABLE"),
]


def test_pool_map_counts_add_up():
    pool = PoolMap(**pool_of("..cc1129+p"))
    assert (pool.free, pool.cached, pool.owned, pool.shared, pool.pinned) == (2, 2, 2, 3, 1)
    assert pool.used == pool.owned + pool.shared
    assert pool.utilisation == 20 / (5 * 16)
    assert PoolMap(**pool_of(".cp")).utilisation is None


class TestClient:
    def test_pool_map(self, client, fake):
        fake.maps.append(json.dumps(pool_of("12c.", news="a newer server has more to say")))
        assert client.pool_map(timeout=WAIT) == PoolMap(**pool_of("12c."))
        assert fake.requests == [{"pool_map": True, "request_id": ""}]

    def test_adapters(self, client, fake):
        assert client.adapters() == ()
        broken = {"name": "b", "rank": None, "resident": False, "error": "no file"}
        fake.adapters = json.dumps([{"name": "a", "rank": 8, "resident": True, "news": 1}, broken])
        assert client.adapters(timeout=WAIT) == (Adapter("a", 8, True), Adapter("b", None, False, "no file"))
        assert fake.requests[-1] == {"adapters": True, "request_id": ""}

    @pytest.mark.parametrize("said", ["{", "[1]", '[{"name": "a"}]', "3"])
    def test_malformed_adapter_list(self, client, fake, said):
        fake.adapters = said
        with pytest.raises(PagedError, match="INTERNAL: the server sent no list of its adapters"):
            client.adapters()

    @pytest.mark.parametrize(("said", "code"), NO_MAPS)
    def test_malformed_pool_map(self, client, fake, said, code):
        fake.maps.append(said)
        with pytest.raises(PagedError) as raised:
            client.pool_map()
        assert raised.value.code == code

    def test_response_without_pool_map(self, client, monkeypatch):
        monkeypatch.setattr(sync_client, "POOL_MAP_REQUEST", {"sampling_parameters": '{"say": ["a"]}'})
        with pytest.raises(PagedError, match="INTERNAL: the server sent no map of its pool"):
            client.pool_map()

    def test_cancel_by_request_id(self, client, fake):
        assert [client.cancel("r", timeout=WAIT), client.cancel("s")] == [1, 2]
        assert fake.requests == [{"stop_request": True, "request_id": name} for name in ("r", "s")]
        with pytest.raises(ValueError, match="request_id=''"):
            client.cancel("")

    def test_response_without_count(self, client, monkeypatch):
        monkeypatch.setattr(sync_client, "STOP_REQUEST", {"sampling_parameters": '{"say": ["a"]}'})
        with pytest.raises(PagedError, match="INTERNAL: the server sent no count"):
            client.cancel("r")

    def test_embedding(self, client, fake):
        assert client.embed("hé", timeout=WAIT, say=["[0.6, 0.8]"]) == Embedding((0.6, 0.8), 7)
        ids = client.embed([np.int64(5), 6], dimensions=2, request_id="r", say=["[1]"])
        assert ids == Embedding((1.0,), 7)
        sent = [json.loads(request["embedding_request"]) for request in fake.requests]
        assert sent == [
            {"input": "hé", "pooling_params": {}},
            {"input": [5, 6], "pooling_params": {"dimensions": [2]}},
        ]
        assert fake.requests[1].keys() == {
            "embedding_request", "sampling_parameters", "return_num_input_tokens", "return_receipt", "request_id",
        }  # fmt: skip

    def test_embedding_errors(self, client):
        with pytest.raises(PagedError, match="INVALID_ARGUMENT: no"):
            client.embed("x", say=[], fail="INVALID_ARGUMENT: no")
        for text in ("null", "N/A", '{"a": 1}'):
            with pytest.raises(PagedError, match="INTERNAL: the server sent no embedding"):
                client.embed("x", say=[text])
        for given, named in (("a\ud800", "input: character 1"), ([1.5], "input=1.5: must be a whole number")):
            with pytest.raises(ValueError, match=named):
                client.embed(given)

    def test_generate(self, client, fake, protocol):
        answer = client.generate("hé", request_id="r", say=["a", "é"])
        assert answer == Completion("aé", "stop", 7, 4)
        assert fake.requests[0]["text_input"] == "hé"
        assert fake.requests[0]["request_id"] == "r"
        assert fake.requests[0]["stream"] is (protocol == "http")  # there, only a stream can be cancelled

    def test_stream(self, client, fake):
        with client.stream(messages=[{"role": "user", "content": "x"}], say=["a", "b"]) as stream:
            assert stream.completion is None
            assert list(stream) == [Delta("a", 2, None), Delta("b", 2, "stop")]
            assert stream.completion == Completion("ab", "stop", 7, 4)
        assert json.loads(fake.requests[0]["messages"]) == [{"role": "user", "content": "x"}]
        assert fake.requests[0]["stream"] is True

    def test_long_prompt_and_output(self, client, fake):
        text = "é" * 3_000_000
        assert client.generate(text, say=[text]).text == text
        assert fake.requests[0]["text_input"] == text

    @pytest.mark.parametrize("said", [[], ["a"]])
    def test_error_before_or_after_the_first_delta(self, client, said):
        stream = client.stream("x", say=said, fail="INVALID_ARGUMENT: top_p=2: no")
        assert [next(stream).text for _ in said] == said
        with pytest.raises(PagedError, match="top_p=2: no") as raised:
            next(stream)
        assert raised.value.code == "INVALID_ARGUMENT"
        assert stream.completion is None
        assert list(stream) == []  # an error is raised once

    def test_cancellation_by_the_server_is_an_error(self, client):
        with pytest.raises(PagedError) as raised:
            client.generate("x", say=["a"], fail="CANCELLED: by the server")
        assert raised.value.code == "CANCELLED"

    def test_unknown_model(self, fake, protocol):
        with pytest.raises(PagedError) as raised:
            Client(fake.url, "nope", protocol).generate("x")
        assert raised.value.code == "NOT_FOUND"

    @pytest.mark.parametrize("said", [[], ["a"]])
    def test_truncated_stream_is_an_error(self, client, said):
        with pytest.raises(PagedError) as raised:
            client.generate("x", say=said, cut=True)
        assert raised.value.code == "UNAVAILABLE"

    def test_server_disconnects(self, client):
        stream = client.stream("x", say=["a"], vanish=True)
        assert next(stream).text == "a"
        with pytest.raises(PagedError) as raised:
            next(stream)
        assert raised.value.code == "UNAVAILABLE"

    def test_no_server(self, protocol):
        with pytest.raises(PagedError) as raised:
            Client("localhost:1", protocol=protocol).generate("x")
        assert raised.value.code == "UNAVAILABLE"

    @pytest.mark.parametrize("said", [[], ["a"]])
    def test_timeout_cancels_the_request(self, client, fake, said):
        with pytest.raises(PagedError) as raised:
            client.generate("x", timeout=0.2, say=said, hold=True)
        assert raised.value.code == "DEADLINE_EXCEEDED"
        assert fake.left.wait(WAIT)

    @pytest.mark.parametrize("timeout", [0, -1, float("nan")])
    def test_invalid_timeout_is_rejected(self, client, timeout):
        with pytest.raises(ValueError, match="timeout="):
            client.stream("x", timeout=timeout)

    def test_leaving_the_with_block_cancels(self, client, fake):
        with client.stream("x", say=["a"], hold=True) as stream:
            assert next(stream).text == "a"
        assert fake.left.wait(WAIT)
        assert stream.completion == Completion("a", "cancelled", 7, 2)
        assert list(stream) == []

    def test_dropping_the_stream_cancels(self, client, fake):
        for _ in client.stream("x", say=["a"], hold=True):
            break
        gc.collect()
        assert fake.left.wait(WAIT)

    @pytest.mark.parametrize("said", [[], ["a"]])
    def test_cancel_from_another_thread_wakes_the_reader(self, client, fake, said):
        stream = client.stream("x", say=said, hold=True)
        assert [next(stream).text for _ in said] == said

        def cancel():
            fake.asked.wait(WAIT)
            stream.cancel()

        threading.Thread(target=cancel).start()
        assert list(stream) == []
        assert fake.left.wait(WAIT)
        assert stream.completion.finish_reason == "cancelled"

    def test_cancelling_a_finished_stream_does_nothing(self, client):
        stream = client.stream("x", say=["a"])
        assert texts(stream) == ["a"]
        stream.cancel()
        assert stream.completion.finish_reason == "stop"

    def test_streams_of_one_client_are_independent(self, client, fake):
        held = client.stream("x", say=["held"], hold=True)
        assert next(held).text == "held"
        streams = [client.stream("x", say=[f"{i}a", f"{i}b"]) for i in range(20)]
        firsts = [next(stream).text for stream in streams]
        assert firsts == [f"{i}a" for i in range(20)]
        assert [texts(stream) for stream in streams] == [[f"{i}b"] for i in range(20)]
        held.cancel()
        assert fake.left.wait(WAIT)

    def test_no_file_descriptor_leaks(self, fake, protocol):
        if protocol == "grpc":
            pytest.skip("gRPC keeps descriptors for its own pollers")
        client = Client(fake.url, protocol=protocol)
        before = len(os.listdir("/proc/self/fd"))
        ended = []  # kept, so that it is not their deletion that closes
        for _ in range(20):
            ended += [client.stream("x", say=["a"]), client.stream("x", say=[], fail="INTERNAL: no")]
            assert texts(ended[-2]) == ["a"]
            with pytest.raises(PagedError):
                next(ended[-1])
        # The fake's own ends of the last connections may take a moment longer.
        assert len(os.listdir("/proc/self/fd")) < before + 20


class TestAsyncClient:
    def run(self, fake, protocol, scenario):
        async def inside():
            async with AsyncClient(fake.url, protocol=protocol) as client:
                return await asyncio.wait_for(scenario(client), WAIT)

        return asyncio.run(inside())

    @staticmethod
    async def arrived(fake):
        """Wait without blocking the event loop, which the client needs."""
        assert await asyncio.to_thread(fake.asked.wait, WAIT)

    @staticmethod
    async def left(fake):
        assert await asyncio.to_thread(fake.left.wait, WAIT)

    def test_generate(self, fake, protocol):
        async def scenario(client):
            return await client.generate("hé", request_id="r", say=["a", "é"])

        assert self.run(fake, protocol, scenario) == Completion("aé", "stop", 7, 4)
        assert fake.requests[0]["text_input"] == "hé"
        assert fake.requests[0]["request_id"] == "r"

    def test_pool_map(self, fake, protocol):
        fake.maps += [json.dumps(pool_of("12c.")), "UNAVAILABLE: the engine has stopped"]

        async def scenario(client):
            assert await client.adapters(timeout=WAIT) == ()
            pool = await client.pool_map(timeout=WAIT)
            with pytest.raises(PagedError, match="the engine has stopped"):
                await client.pool_map()
            return pool

        assert self.run(fake, protocol, scenario) == PoolMap(**pool_of("12c."))

    def test_cancel_by_request_id(self, fake, protocol):
        async def scenario(client):
            with pytest.raises(ValueError, match="request_id=''"):
                await client.cancel("")
            return await client.cancel("r", timeout=WAIT)

        assert self.run(fake, protocol, scenario) == 1

    def test_embedding(self, fake, protocol):
        async def scenario(client):
            with pytest.raises(PagedError, match="INTERNAL: the server sent no embedding"):
                await client.embed([5], say=["null"])
            return await client.embed("hé", timeout=WAIT, say=["[0.6, 0.8]"])

        assert self.run(fake, protocol, scenario) == Embedding((0.6, 0.8), 7)

    def test_stream(self, fake, protocol):
        async def scenario(client):
            async with client.stream(messages=[{"role": "user", "content": "x"}], say=["a", "b"]) as stream:
                assert stream.completion is None
                assert [delta async for delta in stream] == [Delta("a", 2, None), Delta("b", 2, "stop")]
                return stream.completion

        assert self.run(fake, protocol, scenario) == Completion("ab", "stop", 7, 4)

    def test_long_prompt_and_output(self, fake, protocol):
        text = "é" * 3_000_000

        async def scenario(client):
            return (await client.generate(text, say=[text])).text

        assert self.run(fake, protocol, scenario) == text

    @pytest.mark.parametrize(
        ("script", "code"),
        [
            ({"say": [], "fail": "INVALID_ARGUMENT: no"}, "INVALID_ARGUMENT"),
            ({"say": ["a"], "fail": "INTERNAL: no"}, "INTERNAL"),
            ({"say": ["a"], "fail": "CANCELLED: by the server"}, "CANCELLED"),
            ({"say": ["a"], "cut": True}, "UNAVAILABLE"),
            ({"say": ["a"], "vanish": True}, "UNAVAILABLE"),
        ],
    )
    def test_errors(self, fake, protocol, script, code):
        async def scenario(client):
            with pytest.raises(PagedError) as raised:
                await client.generate("x", **script)
            return raised.value.code

        assert self.run(fake, protocol, scenario) == code

    def test_unknown_model_and_no_server(self, fake, protocol):
        async def code(url, model):
            async with AsyncClient(url, model, protocol) as client:
                with pytest.raises(PagedError) as raised:
                    await client.generate("x", say=["a"])
                return raised.value.code

        assert asyncio.run(code(fake.url, "nope")) == "NOT_FOUND"
        assert asyncio.run(code("localhost:1", "paged_llm")) == "UNAVAILABLE"

    @pytest.mark.parametrize("said", [[], ["a"]])
    def test_timeout_cancels_the_request(self, fake, protocol, said):
        async def scenario(client):
            with pytest.raises(PagedError) as raised:
                await client.generate("x", timeout=0.2, say=said, hold=True)
            await self.left(fake)
            return raised.value.code

        assert self.run(fake, protocol, scenario) == "DEADLINE_EXCEEDED"

    def test_leaving_the_with_block_cancels(self, fake, protocol):
        async def scenario(client):
            async with client.stream("x", say=["a"], hold=True) as stream:
                assert (await anext(stream)).text == "a"
            await self.left(fake)
            return stream.completion

        assert self.run(fake, protocol, scenario) == Completion("a", "cancelled", 7, 2)

    def test_break_cancels(self, fake, protocol):
        async def scenario(client):
            async for _ in client.stream("x", say=["a"], hold=True):
                break
            gc.collect()
            await self.left(fake)

        self.run(fake, protocol, scenario)

    @pytest.mark.parametrize("said", [[], ["a"]])
    def test_cancelling_the_task_cancels_the_request(self, fake, protocol, said):
        async def scenario(client):
            task = asyncio.create_task(async_texts(client.stream("x", say=said, hold=True)))
            await self.arrived(fake)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await self.left(fake)

        self.run(fake, protocol, scenario)

    @pytest.mark.parametrize("said", [[], ["a"]])
    def test_cancel_from_another_task_wakes_the_reader(self, fake, protocol, said):
        async def scenario(client):
            stream = client.stream("x", say=said, hold=True)
            task = asyncio.create_task(async_texts(stream))
            await self.arrived(fake)
            stream.cancel()
            await task
            await self.left(fake)
            return stream.completion.finish_reason

        assert self.run(fake, protocol, scenario) == "cancelled"

    def test_cancel_between_reply_and_reader(self):
        """A reply that has arrived is closed even if the task that waits for it has not run yet."""

        async def scenario():
            loop = asyncio.get_running_loop()
            closed = loop.create_future()
            content = SimpleNamespace(readany=lambda: closed)
            reply = SimpleNamespace(status=200, content=content, close=lambda: closed.set_result(b""))

            async def post(body, timeout):
                loop.call_soon(responses.cancel)
                return reply

            responses = HttpResponses(SimpleNamespace(url="", post=post), b"", None)
            return await asyncio.wait_for(responses.next(), WAIT)

        assert asyncio.run(scenario()) is None

    def test_many_concurrent_requests(self, fake, protocol):
        async def scenario(client):
            return await asyncio.gather(*(client.generate("x", say=[f"{i}"]) for i in range(150)))

        answers = self.run(fake, protocol, scenario)
        assert [answer.text for answer in answers] == [f"{i}" for i in range(150)]
