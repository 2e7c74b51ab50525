"""A moved request continues from the blocks of the engine that it came from."""

import threading
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
import torch

from paged_backend.api.request import Origin
from paged_backend.engine.moved_blocks import BlockRun
from paged_backend.engine.remote_engine import RemoteEngine
from paged_backend.engine.router import Router
from paged_backend.utils.local_socket import FrameError
from tests.support.families import FAMILIES, HYBRID_FAMILIES
from tests.support.in_process import WAIT, Output, running, save_tiny, tiny_assembly
from tests.support.pairwise import mostly_nightly
from tests.support.remote_engines import Owner, Peer, SampleHarness, pair
from tests.support.waiting import until

PROMPT = list(range(5, 28))
CASES = {
    "one sample": ({}, {}),
    "samples": ({"n": 3, "temperature": 1.0, "seed": 3}, {}),
    "salt": ({"cache_salt": "tenant"}, {}),
    "int8": ({}, {"kv_cache_dtype": "int8"}),
    "fp8": ({}, {"kv_cache_dtype": "fp8"}),
    "host pool": ({}, {"swap_space": 0.01}),
    "drafts": ({}, {"num_speculative_tokens": 3}),
    "overlap": ({}, {"async_scheduling": True}),
}
MOVED_FAMILIES = ("mistral_window", "gemma3", "falcon_h1", "qwen3_next", "lfm2", "mamba2", "deepseek_v3")


@contextmanager
def two_engines(path, *, small_pool=None, **options):
    """Yield a harness of one engine, a handle to another one behind a socket, its outputs, and the other side.

    small_pool: blocks of the other engine.
    """
    options = {"num_gpu_blocks_override": 128} | options
    first = tiny_assembly(path, **options)
    second = tiny_assembly(path, **options | ({"num_gpu_blocks_override": small_pool} if small_pool else {}))
    near, far = pair()
    with running(first, lead=1) as one:
        peer, outputs = Peer(second, far), SimpleQueue()
        peer.engine.start()
        other = RemoteEngine("other", near, outputs.put, Owner())
        try:
            yield SampleHarness(first, one.engine, one.steps), other, outputs, peer
        finally:
            other.close()
            until(lambda: not peer.service.num_open, "no request of the connection that has ended")
            peer.engine.stop()
    assert second.scheduler.blocks.num_used == 0
    second.scheduler.check()


def start(harness, tokens, **case):
    """Submit a request and wait until its first sample has some tokens."""
    key = harness.submit(PROMPT, **{"max_tokens": 24} | case)
    while len(harness.outputs.get((key, 0), Output()).tokens) < tokens:
        harness.step()
    return key


def move(harness, other, outputs):
    """Move all requests of an engine to the other one, whose outputs the harness gets. Return their blocks."""
    found = SimpleQueue()
    Router(harness.engine).take_out(lambda request: True, lambda request, blocks: found.put(blocks) or other)
    harness.steps.unbound()
    runs = found.get(timeout=WAIT)
    while not harness.steps.empty():
        harness.step()
    harness.steps = outputs
    return runs


def run_moved(path, case, options, tokens=7):
    """Return the outputs of a request that is moved, the tokens that had been computed, and the statistics of the
    second engine."""
    with two_engines(path, **options) as (harness, other, outputs, peer):
        key = start(harness, tokens, **case)
        runs = move(harness, other, outputs)
        samples = harness.collect(key, case.get("n", 1))
        until(lambda: not peer.engine.num_open, "the end of the request")
        return [one.tokens for one in samples], runs, peer.assembly.scheduler.stats


def run_alone(path, case, options):
    with running(tiny_assembly(path, **{"num_gpu_blocks_override": 128} | options)) as one:
        harness = SampleHarness(one.assembly, one.engine, one.steps)
        key = start(harness, 0, **case)
        return [one.tokens for one in harness.collect(key, case.get("n", 1))]


@pytest.mark.parametrize("name", CASES)
def test_moved_request_computes_only_what_follows_its_blocks(tiny, name):
    case, options = CASES[name]
    moved, runs, stats = run_moved(tiny[0], case, options)
    assert moved == run_alone(tiny[0], case, options)
    assert len(runs) == case.get("n", 1) and runs[0].first == 0  # the blocks of the prompt are not sent again
    assert all(run.first >= len(PROMPT) // 4 for run in runs[1:])
    expected = len(PROMPT) // 4 * 4 if "n" in case else len(runs[0].tokens)
    assert stats.cached_tokens >= expected >= 20


@pytest.mark.parametrize("family", mostly_nightly(MOVED_FAMILIES, default=["gemma3", "lfm2", "mamba2", "deepseek_v3"]))
def test_windows_states_and_latents_move(tmp_path, family):
    make = {**FAMILIES, **HYBRID_FAMILIES}[family]
    save_tiny(make(), tmp_path)
    options = {"max_model_len": 64, "num_gpu_blocks_override": 256}
    moved, runs, stats = run_moved(tmp_path, {}, options, tokens=10)
    assert moved == run_alone(tmp_path, {}, options)
    assert stats.cached_tokens >= 28  # the prompt and some of the output
    layout = tiny_assembly(tmp_path, **options).scheduler.blocks.layout
    assert {run.kind for run in runs} == set(range(len(layout.kinds)))


def test_blocks_that_do_not_fit_are_computed_again(tiny):
    """The pool of the other engine has room for one request at a time."""
    prompts = [[number, *PROMPT] for number in range(3)]
    with running(tiny_assembly(tiny[0])) as one:
        expected = one.generate(prompts, max_tokens=24)
    with two_engines(tiny[0], small_pool=13) as (harness, other, outputs, peer):
        keys = [harness.submit(prompt, max_tokens=24) for prompt in prompts]
        while not all(harness.outputs.get((key, 0), Output()).tokens for key in keys):
            harness.step()
        move(harness, other, outputs)
        assert [harness.collect(key, 1)[0].tokens for key in keys] == expected
        assert peer.assembly.scheduler.stats.evictions


def test_blocks_go_to_the_engine_that_another_process_submits_to(tiny):
    """`store` calls back once the other engine has them."""
    with two_engines(tiny[0]) as (harness, other, _, peer):
        start(harness, 7)
        stored = threading.Event()

        def take(request, blocks):
            other.store(blocks, stored.set)

        Router(harness.engine).take_out(lambda request: True, take)
        harness.steps.unbound()
        assert stored.wait(WAIT)
        pool = peer.assembly.scheduler.blocks.pool
        until(lambda: pool.num_cached >= len(PROMPT) // 4, "the blocks in the prefix cache")
        assert other.unsent_bytes == 0


def test_end_of_the_connection_ends_the_wait(tiny):
    with two_engines(tiny[0]) as (harness, other, _, _):
        start(harness, 7)
        other.close()
        stored = threading.Event()
        Router(harness.engine).take_out(lambda request: True, lambda request, blocks: other.store(blocks, stored.set))
        harness.steps.unbound()
        assert stored.wait(WAIT)


def run_of(**changes):
    content = torch.zeros(8, dtype=torch.uint8)
    values = {"origin": Origin("a", b"b"), "tokens": [1, 2, 3, 4], "first": 0, "kind": 0, "content": content}
    return BlockRun(**values | changes)


def test_frame_has_the_same_run():
    run = run_of(kind=2, content=torch.arange(8, dtype=torch.uint8).view(2, 4))
    values, attached = run.write()
    read = BlockRun.read(values, b"".join(attached))
    assert (read.origin, read.tokens, read.first, read.kind) == (run.origin, run.tokens, run.first, run.kind)
    assert read.content.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokens": "1"}, "tokens must be a list of numbers"),
        ({"first": -1}, "first must be"),
        ({"kind": True}, "kind must be"),
        ({"kind": None}, "kind must be"),
        ({"origin": ["a"]}, "blocks: ValueError"),
        ({"origin": ["a", "xy"]}, "blocks: ValueError"),
    ],
)
def test_malformed_frames_are_rejected(change, problem):
    values, attached = run_of().write()
    with pytest.raises(FrameError, match=problem):
        BlockRun.read(values | change, b"".join(attached))


def test_blocks_of_another_size_are_not_stored(tiny, caplog):
    with two_engines(tiny[0]) as (_, other, _, peer):
        for run in (run_of(), run_of(kind=3), run_of(tokens=[1])):
            stored = threading.Event()
            other.store([run], stored.set)
            assert stored.wait(WAIT)
        until(lambda: caplog.text.count("have another size") == 3, "the warnings")
        assert peer.assembly.scheduler.blocks.pool.num_cached == 0
