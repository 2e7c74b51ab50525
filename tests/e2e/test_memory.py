"""KV cache features through a real server: sharing, copy-on-write, cache hits, eviction, offloading, preemption."""

import json
import string
from itertools import cycle, islice

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from paged_backend.api.request import Origin
from paged_backend.kv.content import Entry
from paged_client.serving.tritonserver import TritonServer
from tests.support.in_process import byte_tokenizer, save_tiny
from tests.support.triton import idle, metrics, post, raw_stream, raw_streams
from tests.support.waiting import until

BLOCK, POOL = 4, 128  # tokens per block; number of blocks
pytestmark = pytest.mark.nightly  # tests/integration and tests/engine test the same in process
OPTIONS = {"dtype": "float32", "block_size": BLOCK, "num_gpu_blocks_override": POOL, "max_num_seqs": 16}
GREEDY = {"temperature": 0, "ignore_eos": True}
LETTERS = string.ascii_letters + string.digits
PROMPT = "Call/me/Ishmael.Some/years/ago--never/min"  # 41 tokens: ten blocks, and a last token that is always computed


@pytest.fixture(scope="module")
def printable(tmp_path_factory):
    """Return (directory, model) of a model like `tiny` with 94 printable tokens and a context of 512."""
    directory = tmp_path_factory.mktemp("printable")
    config = LlamaConfig(
        vocab_size=94,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=BLOCK * POOL,
    )
    return directory, save_tiny(config, directory)


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def tiered(disk):
    """Options of a server that offloads evicted blocks to the host and to disk."""
    swap = {"preemption_mode": "swap", "swap_space": 0.05}
    return OPTIONS | swap | {"disk_cache_dir": str(disk), "tier_read_mode": "always"}


@pytest.fixture(scope="module")
def swapping(printable, tiered):
    with TritonServer(printable[0], tiered, engine_only=True) as running:
        yield running


@pytest.fixture(scope="module")
def small(printable):
    """A server with an int8 KV cache, and neither swap space nor offloading."""
    options = OPTIONS | {"kv_cache_dtype": "int8", "preemption_mode": "recompute"}
    with TritonServer(printable[0], options, engine_only=True) as running:
        yield running


def start(stream, text, *, streaming=False, **sampling):
    stream.send(
        text_input=text,
        stream=streaming,
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_receipt=True,
        sampling_parameters=GREEDY | sampling,
    )


def finish(stream):
    """Return (texts, finish reasons, receipt) of the only open request of the stream."""
    parts = stream.all()
    assert not parts[-1].error, parts[-1].error
    texts = [b"".join(pieces).decode() for pieces in zip(*(part.outputs["text_output"] for part in parts), strict=True)]
    reasons = [reason.decode() for reason in parts[-1].outputs["finish_reason"]]
    return texts, reasons, json.loads(parts[-1].outputs["receipt"][0])


def ask(server, text, **sampling):
    with raw_stream(server) as stream:
        start(stream, text, **sampling)
        return finish(stream)


def long_text(seed, length):
    """Return text whose beginning is different for each seed."""
    return "".join(islice(cycle(LETTERS[seed:] + LETTERS[:seed]), length))


def grown(server, before):
    return {name: value - before[name] for name, value in metrics(server).items()}


def preemptions(server, before):
    after = grown(server, before)
    return {kind: after[f"paged_preemptions_total{{{kind}}}"] for kind in ("swap", "recompute")}


# --- beam search -------------------------------------------------------------------------------------------------


def beams(printable, text, width, max_tokens, stop=None):
    """Return the text of all beams of transformers."""
    tokenizer, model = byte_tokenizer(), printable[1]
    model.generation_config.eos_token_id = None
    config = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, num_beams=width, num_return_sequences=width
    )
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    stops = {"stop_strings": [stop], "tokenizer": tokenizer} if stop else {}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **stops)
    # Outputs that a stop string has ended are padded with -1.
    return [tokenizer.decode([token for token in one[ids.shape[1] :] if token >= 0]) for one in found]


@pytest.mark.parametrize(("width", "n"), [(2, 1), (4, 4), (5, 3)])
def test_beams_match_transformers(printable, swapping, width, n):
    """Concurrently over a gRPC stream and HTTP, first without and then with cache hits."""
    expected = beams(printable, PROMPT, width, 24)[:n]
    sampling = {"beam_width": width, "n": n, "max_tokens": 24}
    texts, reasons, receipt = ask(swapping, PROMPT, streaming=True, **sampling)
    assert texts == expected
    assert reasons == ["length"] * n
    assert receipt["generated_tokens"] == 24 * n
    assert receipt["blocks_copied"] > 0
    body = {"text_input": PROMPT, "exclude_input_in_output": True, "ignore_eos": True} | sampling
    status, reply = post(swapping, body)
    assert status == 200, reply
    assert json.loads(reply)["text_output"] == (expected if n > 1 else expected[0])
    idle(swapping)


def test_a_streamed_beam_search_sends_its_common_prefix_early(printable, swapping):
    early = []
    for seed in range(4):
        with raw_stream(swapping) as stream:
            start(stream, long_text(seed, 21), streaming=True, beam_width=2, n=2, max_tokens=48)
            parts = [part.outputs["text_output"] for part in stream.all()]
        assert [b"".join(pieces).decode() for pieces in zip(*parts, strict=True)] == beams(
            printable, long_text(seed, 21), 2, 48
        )
        assert all(first == second for first, second in parts[:-1])
        early.append(b"".join(first for first, _ in parts[:-1]))
    assert any(early)
    idle(swapping)


def test_a_stop_string_ends_beams(printable, swapping):
    """A beam ends alone if others lack the string; the search ends if all beams have it in common."""
    free = beams(printable, PROMPT, 4, 24)
    for stop in (free[0][-6:], free[0][:2]):
        expected = beams(printable, PROMPT, 4, 24, stop)
        assert any(stop in one for one in expected)
        texts, reasons, _ = ask(swapping, PROMPT, streaming=True, beam_width=4, n=4, max_tokens=24, stop=[stop])
        assert texts == [one.partition(stop)[0] for one in expected]
        assert reasons == ["stop" if stop in one else "length" for one in expected]
    idle(swapping)


# --- samples -----------------------------------------------------------------------------------------------------


def test_samples_share_the_prompt_until_they_diverge(swapping):
    sampling = {"n": 3, "max_tokens": 100, "temperature": 1, "seed": 5}

    def shares():
        """Run the request, and return whether the metrics, which may be old, have shown shared blocks meanwhile."""
        with raw_stream(swapping) as stream:
            start(stream, PROMPT + "!", streaming=True, **sampling)
            seen = False
            while not stream.next().final:
                seen = seen or metrics(swapping)["paged_kv_blocks{shared}"] > 0
        return seen

    until(shares, "shared blocks")
    idle(swapping)
    before = metrics(swapping)
    texts, _, receipt = ask(swapping, PROMPT + "!", cache_salt="diverge", **sampling)
    assert len(set(texts)) == 3
    idle(swapping)
    assert grown(swapping, before)["paged_kv_copies_total"] == receipt["blocks_copied"] >= 2
    assert metrics(swapping)["paged_kv_blocks{shared}"] == 0


def test_a_stop_string_ends_one_sample_only(swapping):
    sampling = {"n": 3, "max_tokens": 40, "temperature": 1, "seed": 5}
    whole, _, _ = ask(swapping, PROMPT, **sampling)
    pairs = (whole[1][at : at + 2] for at in range(8, 38))
    stop = next(pair for pair in pairs if not any(pair in other for other in (whole[0], whole[2])))
    texts, reasons, _ = ask(swapping, PROMPT, streaming=True, stop=stop, **sampling)
    assert texts == [whole[0], whole[1].partition(stop)[0], whole[2]]
    assert reasons == ["length", "stop", "length"]
    idle(swapping)


# --- the cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["swapping", pytest.param("small", marks=pytest.mark.nightly)])
def test_a_receipt_reports_cache_hits(request, fixture):
    server = request.getfixturevalue(fixture)
    receipts, answers = [], set()
    for salt in ("one", "one", "another"):
        before = metrics(server)
        texts, _, receipt = ask(server, PROMPT, cache_salt=salt, max_tokens=8)
        answers.update(texts)
        assert receipt["prompt_tokens"] == 41
        assert receipt["generated_tokens"] == 8
        idle(server)
        assert grown(server, before)["paged_prefix_cache_hit_tokens_total"] == receipt["cached_tokens"]
        receipts.append((receipt["cached_tokens"], receipt["blocks_reused"], receipt["blocks_new"]))
    assert receipts == [(0, 0, 12), (40, 10, 2), (0, 0, 12)]
    assert len(answers) == 1


def test_evicted_blocks_are_restored_from_the_host(swapping):
    texts, _, _ = ask(swapping, PROMPT, cache_salt="host", max_tokens=8)
    for seed in (10, 11):
        ask(swapping, long_text(seed, 450), cache_salt="others", max_tokens=1)
    before = metrics(swapping)
    again, _, receipt = ask(swapping, PROMPT, cache_salt="host", max_tokens=8)
    assert again == texts
    assert (receipt["cached_tokens"], receipt["blocks_from_host"], receipt["blocks_reused"]) == (40, 10, 0)
    idle(swapping)
    after = grown(swapping, before)
    assert after["paged_host_cache_hit_tokens_total"] == 40
    assert after["paged_kv_swapped_blocks_total{in}"] == 10
    assert metrics(swapping)["paged_host_blocks{cached}"] > 0


# --- the queue ---------------------------------------------------------------------------------------------------


def test_a_higher_priority_request_is_admitted_first(swapping):
    """Each of three requests needs most of the pool. The last is admitted before the second, which waits at a lower
    priority, but does not preempt the first, which runs at a higher one.
    """
    idle(swapping)
    with raw_streams(swapping, 2) as (first, others):
        start(first, long_text(20, 250), streaming=True, max_tokens=250, priority=1)
        assert not first.next().error
        start(others, long_text(21, 450), max_tokens=4, priority=3)  # on one stream their order is kept
        start(others, long_text(22, 450), max_tokens=5, priority=2)
        assert finish(first)[2]["preemptions"] == 0
        receipts = [finish(others)[2] for _ in range(2)]
    assert [receipt["generated_tokens"] for receipt in receipts] == [5, 4]
    idle(swapping)


def test_a_higher_priority_request_preempts_a_running_one(swapping):
    before = metrics(swapping)
    alone = [ask(swapping, long_text(seed, 250), max_tokens=200)[0] for seed in (24, 25)]
    with raw_streams(swapping, 2) as (first, second):
        start(first, long_text(24, 250), streaming=True, max_tokens=200, priority=1)
        head = first.next().text
        start(second, long_text(25, 250), max_tokens=200, priority=-1)
        assert finish(second)[0] == alone[1]
        tail, _, receipt = finish(first)
    assert head + tail[0] == alone[0][0]
    assert receipt["preemptions"] == sum(preemptions(swapping, before).values()) > 0
    idle(swapping)


@pytest.mark.parametrize(
    ("fixture", "kind"), [("swapping", "swap"), pytest.param("small", "recompute", marks=pytest.mark.nightly)]
)
def test_no_token_is_lost_when_the_pool_is_exhausted(request, fixture, kind):
    """Six requests, two of them with two samples, of 30 blocks or more each, in a pool of 128."""
    server = request.getfixturevalue(fixture)
    wanted = [(long_text(30 + index, 30), {"n": 2 if index < 2 else 1, "max_tokens": 90}) for index in range(6)]
    alone = [ask(server, text, **sampling)[0] for text, sampling in wanted]
    before = metrics(server)
    with raw_streams(server, len(wanted)) as streams:
        for stream, (text, sampling) in zip(streams, wanted, strict=True):
            start(stream, text, streaming=True, **sampling)
        answers = [finish(stream) for stream in streams]
    assert [texts for texts, _, _ in answers] == alone
    idle(server)
    after = grown(server, before)
    counted = preemptions(server, before)
    assert sum(counted.values()) == sum(receipt["preemptions"] for _, _, receipt in answers)
    assert counted[kind] > 0
    moved = [after[f"paged_kv_swapped_blocks_total{{{way}}}"] for way in ("out", "in")]
    assert all(moved) if kind == "swap" else not any(moved)


# --- quantized KV cache ------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_samples_and_beams_with_an_int8_kv_cache(small):
    sampling = {"temperature": 1, "max_tokens": 24}
    alone = [ask(small, PROMPT, cache_salt=str(seed), seed=seed, **sampling)[0][0] for seed in (7, 8)]
    assert ask(small, PROMPT, n=2, seed=7, **sampling)[0] == alone
    search = {"beam_width": 3, "n": 3, "max_tokens": 24}
    cold, found = (ask(small, PROMPT, cache_salt="beams", **search) for _ in range(2))
    assert found[0] == cold[0]
    assert len(set(cold[0])) == 3
    assert (cold[2]["cached_tokens"], found[2]["cached_tokens"]) == (0, 40)
    assert min(cold[2]["blocks_copied"], found[2]["blocks_copied"]) > 0
    idle(small)


# --- the disk tier: last, because it restarts the shared server --------------------------------------------------


def damage_first_block_of(text, directory):
    """Truncate the file of a prompt's first block."""
    tokens = tuple(byte_tokenizer().encode(text[:BLOCK], add_special_tokens=False))
    key = Entry(Origin(""), tokens).key.hex()
    (path,) = directory.glob(f"*/*/{key}.safetensors")
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.nightly
def test_a_restarted_server_reuses_disk_prefixes_and_survives_a_damaged_one(printable, swapping, tiered, disk):
    good, bad = long_text(50, 41), long_text(51, 41)
    texts = [ask(swapping, text, max_tokens=8)[0] for text in (good, bad)]
    assert metrics(swapping)["paged_disk_tier_up"] == 1
    swapping.stop()
    with TritonServer(printable[0], tiered, engine_only=True) as server:
        again, _, receipt = ask(server, good, max_tokens=8)
        assert again == texts[0]
        assert (receipt["cached_tokens"], receipt["blocks_from_host"]) == (40, 10)
        idle(server)
        now = metrics(server)
        assert now["paged_disk_blocks_read_total"] == 10
        assert now["paged_disk_blocks"] >= 20
        assert now["paged_disk_tier_up"] == 1

        damage_first_block_of(bad, disk)
        again, _, receipt = ask(server, bad, max_tokens=8)
        assert again == texts[1]
        assert receipt["cached_tokens"] == 0
        until(lambda: metrics(server)["paged_disk_tier_up"] == 0, "the end of the tier")
        assert "the disk cache is disabled" in server.log()
        assert ask(server, good, max_tokens=8)[0] == texts[0]
        idle(server)
