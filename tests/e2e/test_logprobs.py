"""Logprobs through a real Triton server, with tritonclient and the client library."""

import json

import pytest
import torch

from paged_client import Client
from tests.support.in_process import byte_tokenizer
from tests.support.triton import idle, raw_stream

PROMPT = "The sea is"
ASKED = {"return_logprobs": True, "return_cumulative_logprob": True, "return_num_output_tokens": True}
SAMPLED = {"temperature": 1.3, "seed": 11, "max_tokens": 10, "ignore_eos": True}


def answer(server, *, stream, **sampling):
    with raw_stream(server) as connection:
        inputs = {"text_input": PROMPT, "stream": stream, "exclude_input_in_output": True}
        connection.send(sampling_parameters=SAMPLED | sampling, **inputs, **ASKED)
        return connection.all()


def tokens_of(responses, sample=0):
    """Return the id of each token of a sample, and its logprob entries by id."""
    parts = [json.loads(one.outputs["logprobs"][sample]) for one in responses]
    counts = [one.outputs["num_output_tokens"][sample] for one in responses]
    assert [len(part) for part in parts] == counts
    tokens = [token for part in parts for token in part]
    return [(int(next(iter(token))), token) for token in tokens]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_logprobs_match_transformers(tiny_server, tiny, stream, n):
    responses = answer(tiny_server, stream=stream, n=n, logprobs=3)
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode(PROMPT)
    for sample in range(n):
        tokens = tokens_of(responses, sample)
        assert len(tokens) == 10
        ids = [token for token, _ in tokens]
        with torch.inference_mode():
            logits = tiny[1](torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        log_probs, total = logits.log_softmax(-1), 0.0
        for row, (drawn, entries) in zip(log_probs, tokens, strict=True):
            assert {int(token) for token in entries} == {drawn, *row.topk(3).indices.tolist()}
            for token, entry in entries.items():
                assert entry["logprob"] == pytest.approx(row[int(token)].item(), abs=1e-4)
                assert entry["rank"] == 1 + (row > row[int(token)]).sum().item()
                assert entry["decoded_token"] == tokenizer.decode([int(token)])
            total += entries[str(drawn)]["logprob"]
        assert responses[-1].outputs["cumulative_logprob"][sample] == pytest.approx(total, abs=1e-4)
    idle(tiny_server)


def test_streamed_logprobs_add_up_to_the_whole(tiny_server):
    (whole,) = answer(tiny_server, stream=False, logprobs=2)
    parts = answer(tiny_server, stream=True, logprobs=2)
    pieces = [json.loads(part.outputs["logprobs"][0]) for part in parts]
    entries = [entry for piece in pieces for entry in piece]
    for one, other in zip(entries, json.loads(whole.outputs["logprobs"][0]), strict=True):
        assert one.keys() == other.keys()
    sums = [part.outputs["cumulative_logprob"][0] for part in parts]
    seen = 0.0
    for piece, total in zip(pieces, sums, strict=True):
        seen += sum(next(iter(entry.values()))["logprob"] for entry in piece)
        assert total == pytest.approx(seen, abs=1e-4)
    assert sums[-1] == pytest.approx(whole.outputs["cumulative_logprob"][0], abs=1e-4)


def test_without_logprobs_only_the_cumulative_sum_is_sent(tiny_server):
    (asked,) = answer(tiny_server, stream=False, logprobs=0)
    (unasked,) = answer(tiny_server, stream=False)
    assert unasked.outputs["logprobs"] == [b"null"]
    assert unasked.outputs["cumulative_logprob"] == pytest.approx(asked.outputs["cumulative_logprob"], abs=1e-4)
    assert unasked.outputs["cumulative_logprob"][0] < 0


def test_tokens_cut_by_a_stop_string_have_no_logprobs(tiny_server):
    (whole,) = answer(tiny_server, stream=False, logprobs=0)
    ids = [token for token, _ in tokens_of([whole])]
    end = next(token for token in ids[1:] if token < 94)  # a byte that is a whole character
    (stopped,) = answer(tiny_server, stream=False, logprobs=0, stop=byte_tokenizer().decode([end]))
    assert [token for token, _ in tokens_of([stopped])] == ids[: ids.index(end) + 1]
    assert len(ids) > ids.index(end) + 1


def test_logprobs_of_beams(tiny_server):
    with raw_stream(tiny_server) as connection:
        search = {"beam_width": 3, "n": 2, "logprobs": 1, "max_tokens": 6, "ignore_eos": True}
        connection.send(text_input=PROMPT, stream=True, sampling_parameters=search, **ASKED)
        responses = connection.all()
    for sample in range(2):
        tokens = tokens_of(responses, sample)
        assert len(tokens) == 6
        total = sum(entries[str(drawn)]["logprob"] for drawn, entries in tokens)
        assert responses[-1].outputs["cumulative_logprob"][sample] == pytest.approx(total, abs=1e-4)
    assert tokens_of(responses, 0) != tokens_of(responses, 1)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_logprobs_in_the_client_library(tiny_server, protocol):
    url = {"grpc": tiny_server.grpc_url, "http": tiny_server.http_url}[protocol]
    with Client(url, protocol=protocol) as client:
        whole = client.generate(PROMPT, logprobs=2, n=2, **SAMPLED)
        with client.stream(PROMPT, logprobs=2, **SAMPLED) as stream:
            deltas = list(stream)
        assert client.generate(PROMPT, **SAMPLED).logprobs is None
    for sample in (whole, *whole.others):
        assert len(sample.logprobs) == sample.num_output_tokens == 10
        assert sample.cumulative_logprob == pytest.approx(sum(drawn.logprob for drawn, *_ in sample.logprobs), abs=1e-4)
    streamed = [drawn.token_id for delta in deltas for drawn, *_ in delta.logprobs]
    assert streamed == [drawn.token_id for drawn, *_ in whole.logprobs]
    assert [len(delta.logprobs) for delta in deltas] == [delta.num_output_tokens for delta in deltas]
    assert deltas[-1].cumulative_logprob == pytest.approx(whole.cumulative_logprob, abs=1e-4)
