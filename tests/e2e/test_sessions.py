"""Sessions over both protocols."""

import asyncio
import json

import pytest

from paged_client import AsyncClient, Client, PagedError
from paged_client.serving.tritonserver import TritonServer
from tests.support.triton import MODEL, idle, metrics, post, raw_stream, tensors
from tests.support.waiting import WAIT, until

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def turn(server, text, sequence_id=7, *, stream=None, sampling=GREEDY, **flags):
    """Take one turn over gRPC, as users of tritonclient do."""
    inputs = {"text_input": text, "sampling_parameters": sampling, "exclude_input_in_output": True}
    with raw_stream(server) as raw:
        raw.client.async_stream_infer(
            MODEL,
            tensors(inputs | {"return_receipt": True}),
            sequence_id=sequence_id,
            enable_empty_final_response=True,
            **flags,
        )
        (answer,) = [response for response in raw.all() if response.text is not None or response.error]
    if answer.error:
        raise answer.error
    receipt = answer.outputs.get("receipt")
    return answer.text, json.loads(receipt[0]) if receipt else None


def whole(server, text):
    """Generate without a session."""
    return turn(server, text, 0)[0]


@pytest.mark.parametrize("sequence_id", [7, "a talk"])
def test_a_turn_continues_where_the_last_one_ended(server, sequence_id):
    texts = ["Once upon a time, in a house at the edge of the wood, there lived", " The next day,", " And then"]
    said = ""
    for number, text in enumerate(texts):
        answer, receipt = turn(server, text, sequence_id, sequence_start=number == 0, sequence_end=number == 2)
        assert answer == whole(server, said + text)
        assert receipt["prompt_tokens"] > len(said.split())
        if number:
            assert receipt["cached_tokens"] > 0
        said += text + answer
    with pytest.raises(Exception, match="no such session"):
        turn(server, "more", sequence_id)
    idle(server)


def test_sessions_over_http(server):
    def ask(**body):
        body = {"exclude_input_in_output": True, "sequence_id": 9} | GREEDY | body
        status, reply = post(server, body)
        return status, json.loads(reply)

    status, first = ask(text_input="Once upon a time", sequence_start=True)
    assert status == 200, first
    status, second = ask(text_input=" The next day,")
    assert second["text_output"] == whole(server, "Once upon a time" + first["text_output"] + " The next day,")
    assert metrics(server)["paged_kv_blocks{pinned}"] > 0
    assert ask(text_input="", sequence_end=True)[0] == 200
    status, refused = ask(text_input="more")
    assert status == 400
    assert "sequence_id=9: no such session" in refused["error"]
    idle(server)


def test_sessions_of_messages(server):
    """A session of messages equals a client that sends the whole conversation."""
    first, second = ({"role": "user", "content": text} for text in ("Name a colour.", "And another one."))
    with Client(server.grpc_url) as client:
        with client.conversation(temperature=0, max_tokens=12) as talk:
            answers = [talk.generate(messages=[message]) for message in (first, second)]
        said = [first, {"role": "assistant", "content": answers[0].text}, second]
        assert client.generate(messages=said, temperature=0, max_tokens=12).text == answers[1].text
        assert answers[1].receipt["cached_tokens"] > 0
    idle(server)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_cancelled_turn_restores_the_session(server, protocol):
    url = server.grpc_url if protocol == "grpc" else server.http_url
    with Client(url, protocol=protocol) as client, client.conversation(temperature=0, ignore_eos=True) as talk:
        first = talk.generate("Once upon a time", max_tokens=8)
        for _ in range(3):
            with talk.stream(" Nobody", max_tokens=4000) as stream:
                next(stream)
        with talk.stream(" The next day,", max_tokens=8) as stream:
            second = "".join(delta.text for delta in stream)
        conversation = "Once upon a time" + first.text + " The next day,"
        assert second == client.generate(conversation, max_tokens=8, temperature=0, ignore_eos=True).text
    idle(server)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_asyncio_conversation(server, protocol):
    """Turns that are cancelled, by closing the stream or with their task, restore the session."""
    url = server.grpc_url if protocol == "grpc" else server.http_url

    async def scenario():
        async with (
            AsyncClient(url, protocol=protocol) as client,
            client.conversation(temperature=0, ignore_eos=True) as talk,
        ):
            first = await talk.generate("Once upon a time", max_tokens=8)
            for _ in range(3):
                async with talk.stream(" Nobody", max_tokens=4000) as stream:
                    await anext(stream)
                    with pytest.raises(PagedError, match="its previous turn is still running"):
                        await talk.generate(" at once", max_tokens=2)
            lost = asyncio.create_task(talk.generate(" Nobody", max_tokens=4000))
            await asyncio.to_thread(until, lambda: metrics(server)["paged_requests{running}"], "the turn that is lost")
            lost.cancel()
            await asyncio.wait([lost])
            async with talk.stream(" The next day,", max_tokens=8) as stream:
                second = "".join([delta.text async for delta in stream])
            conversation = "Once upon a time" + first.text + " The next day,"
            assert second == (await client.generate(conversation, max_tokens=8, temperature=0, ignore_eos=True)).text
            return talk.sequence_id

    sequence_id = asyncio.run(asyncio.wait_for(scenario(), WAIT))
    with Client(server.grpc_url) as client, pytest.raises(PagedError, match="no such session"):
        client.generate("more", sequence_id=sequence_id)
    idle(server)


@pytest.mark.parametrize("error", [ZeroDivisionError, None])
def test_an_error_in_an_asyncio_conversation(server, error):
    async def scenario():
        async with AsyncClient(server.grpc_url) as client, client.conversation(ignore_eos=True) as talk:
            await talk.generate("Once", max_tokens=2)
            await client.generate("", sequence_id=talk.sequence_id, sequence_end=True)
            if error:
                raise error

    if error:
        with pytest.raises(error):
            asyncio.run(scenario())
    else:
        asyncio.run(scenario())  # ending an expired session is not an error
    idle(server)


def test_a_concurrent_turn_of_a_session_is_rejected(server):
    with Client(server.grpc_url) as client, client.conversation(ignore_eos=True) as talk:
        talk.generate("Once", max_tokens=2)
        with talk.stream(" upon", max_tokens=4000) as stream:
            next(stream)
            with pytest.raises(PagedError, match="its previous turn is still running") as caught:
                client.generate("no", sequence_id=talk.sequence_id, max_tokens=2)
            assert caught.value.code == "UNAVAILABLE"
    idle(server)


def test_a_stop_string_is_not_part_of_the_session(server):
    with Client(server.grpc_url) as client:
        free = client.generate("Once upon a time", temperature=0, max_tokens=24).text
        stop = " " + free.split()[3]
        with client.conversation(temperature=0) as talk:
            first = talk.generate("Once upon a time", max_tokens=24, stop=[stop])
            assert first.text == free[: free.index(stop)]
            second = talk.generate("\n\nThe end.", max_tokens=8)
        conversation = f"Once upon a time{first.text}\n\nThe end."
        assert second.text == client.generate(conversation, temperature=0, max_tokens=8).text
    idle(server)


@pytest.mark.parametrize(("sampling", "field"), [({"n": 2}, "n=2"), ({"beam_width": 2}, "beam_width=2")])
def test_a_session_rejects_several_samples(server, sampling, field):
    with Client(server.grpc_url) as client, pytest.raises(PagedError, match=f"{field}: must be 1 in a session"):
        client.generate("Once", sequence_id=11, sequence_start=True, **sampling)


@pytest.mark.nightly
def test_sessions_need_the_prefix_cache(tiny):
    options = {"dtype": "float32", "num_gpu_blocks_override": 64, "enable_prefix_caching": False}
    refused = pytest.raises(Exception, match="sequence_id=1: sessions need the prefix cache")
    with TritonServer(tiny[0], options, engine_only=True) as server, refused:
        turn(server, "x", 1, sequence_start=True)


def test_a_timed_out_turn_keeps_its_blocks(server):
    body = {"text_input": "Once upon a time " * 8, "max_tokens": 4000, "ignore_eos": True, "timeout": 1_000_000}
    assert post(server, body | {"sequence_id": 12, "sequence_start": True})[0] == 200
    until(lambda: metrics(server)["paged_kv_blocks{pinned}"] > 0, "the blocks that the session keeps")
    assert post(server, {"text_input": "", "sequence_id": 12, "sequence_end": True})[0] == 200
    idle(server)


def test_an_error_inside_a_conversation_is_not_masked(server):
    """The conversation cannot be ended either, because its session has expired."""

    def stumble(client):
        with client.conversation() as talk:
            talk.generate("Once", max_tokens=2)
            client.generate("", sequence_id=talk.sequence_id, sequence_end=True)
            raise ZeroDivisionError

    with Client(server.grpc_url) as client, pytest.raises(ZeroDivisionError):
        stumble(client)
    idle(server)
