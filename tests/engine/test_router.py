"""Requests that are moved from one engine to another after some tokens have the output of an uninterrupted run."""

from dataclasses import replace
from queue import SimpleQueue

import pytest

from paged_backend.api.errors import ErrorCode
from paged_backend.api.request import FinishReason
from paged_backend.engine.engine import Engine
from paged_backend.engine.router import Router
from tests.support.adapters import adapter_files, write_adapter_list
from tests.support.digests import fingerprints_of_tokens
from tests.support.grammars import compile_guides, create_compiler
from tests.support.in_process import EngineHarness, Output, running, tiny_assembly
from tests.support.remote_engines import SampleHarness
from tests.support.waiting import until

__all__ = ["adapter_files"]

PROMPT = list(range(5, 25))
CASES = {
    "greedy": {"max_tokens": 24},
    "seed": {"max_tokens": 24, "temperature": 1.0, "seed": 11, "top_p": 0.9},
    "penalties": {"max_tokens": 24, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "logprobs": {"max_tokens": 24, "logprobs": 3, "prompt_logprobs": 2},
    "digest": {"max_tokens": 24, "prompt_logprobs": 0, "logits_digest": True},
    "samples": {"max_tokens": 24, "temperature": 1.0, "seed": 3, "n": 3},
    "min_tokens": {"max_tokens": 40, "min_tokens": 30, "ignore_eos": False, "stop_token_ids": list(range(160))},
    "bad_words": {"max_tokens": 24, "temperature": 1.0, "seed": 5, "bad_words_token_ids": [[7], [9, 12]]},
    "thinking": {
        "max_tokens": 24, "temperature": 2.0, "seed": 5, "n": 2, "thinking_token_budget": 9,
        "marks": ((25, 26), (7, 8)), "logit_bias": {"25": 7, "26": 7},
    },
    "allowed": {"max_tokens": 24, "temperature": 1.0, "seed": 5, "allowed_token_ids": list(range(40, 90))},
    "beams": {"max_tokens": 12, "beam_width": 3, "n": 2},
}  # fmt: skip


class Front(Router):
    def submit(self, request):
        self.deliver(replace(request, announcement=self.own.announce(request.key)))


def release(front, successor, assembly):
    """Release the memory of an engine whose later requests go to the successor."""
    front.release_memory(successor, lambda request, blocks: successor)
    until(lambda: assembly.model_memory.released, "released memory")


class InProcess:
    """The interface of an engine in another process, over an engine of this one."""

    alive = True

    def __init__(self, engine: Engine, guides=None):
        self.engine, self.requests, self._guides = engine, [], guides
        self.abort, self.end, self.end_all, self.expire = engine.abort, engine.end, engine.end_all, engine.expire

    def submit(self, request, blocks=()):
        self.requests.append(request)
        self.engine.submit(replace(request, guides=self._guides() if self._guides else ()))


@pytest.fixture(scope="module")
def assemblies(tiny):
    return [tiny_assembly(tiny[0], num_gpu_blocks_override=128) for _ in range(2)]


def run(assemblies, case, *, move_after=None, guides=None):
    """Return the samples of a request. move_after: tokens of its first sample after which it is moved, and back."""
    first, second = assemblies
    n = case.get("n", 1)
    with running(first, lead=1) as one, running(second) as two:
        front = Front(one.engine)
        harness = SampleHarness(first, front, one.steps)
        key = harness.submit(PROMPT, guides=guides() if guides else (), **case)
        if move_after is None:
            one.steps.unbound()
            return harness.collect(key, n)
        other = InProcess(two.engine, guides)
        while len(harness.outputs.get((key, 0), Output()).tokens) < move_after and case.get("beam_width", 1) == 1:
            harness.step()
        moved = SimpleQueue()
        front.take_out(lambda request: True, lambda request, blocks: moved.put(request) or other)
        one.steps.unbound()
        request = moved.get(timeout=60)
        while not harness.steps.empty():
            harness.step()
        if request.progress:
            tokens = [harness.outputs.get((key, i), Output()).tokens for i in range(n)]
            assert [list(output) for output in request.progress.outputs] == tokens
        harness.steps = two.steps
        return harness.collect(key, n)


@pytest.mark.parametrize("name", CASES)
def test_moved_request_has_the_same_output(assemblies, name, monkeypatch):
    monkeypatch.setattr("paged_backend.sampling.fingerprints.fingerprints", fingerprints_of_tokens)
    expected = run(assemblies, CASES[name])
    moved = run(assemblies, CASES[name], move_after=7)
    for one, other in zip(expected, moved, strict=True):
        assert other.tokens == one.tokens and other.finish is one.finish
        assert other.fingerprints == one.fingerprints
        assert len(one.fingerprints) == (len(PROMPT) - 1 + 24 if "logits_digest" in CASES[name] else 0)
        assert [[token.token for token in step] for step in other.logprobs] == [
            [token.token for token in step] for step in one.logprobs
        ]
        for step, same in zip(one.logprobs, other.logprobs, strict=True):
            assert [token.logprob for token in same] == pytest.approx([token.logprob for token in step], abs=1e-4)
        assert (other.prompt_logprobs is None) == (one.prompt_logprobs is None)


@pytest.mark.parametrize("options", [{"async_scheduling": True}, {"num_speculative_tokens": 3}])
@pytest.mark.parametrize("name", ["greedy", "seed", "samples"])
def test_moved_request_has_the_same_output_with_steps_in_flight_and_drafts(tiny, assemblies, options, name):
    others = [tiny_assembly(tiny[0], num_gpu_blocks_override=128, **options) for _ in range(2)]
    expected, moved = run(assemblies, CASES[name]), run(others, CASES[name], move_after=7)
    assert [one.tokens for one in moved] == [one.tokens for one in expected]


def test_moved_request_keeps_its_adapter(tiny, adapter_files, tmp_path):
    """An engine whose adapter of this name has other files does not continue the request."""
    lists = []
    for name in list(adapter_files)[:2]:
        (tmp_path / name).mkdir()
        lists.append(write_adapter_list(tmp_path / name, {"mine": adapter_files[name]}))
    options = {"num_gpu_blocks_override": 128, "enable_lora": True, "max_lora_rank": 16}
    case = {"max_tokens": 24, "lora_name": "mine"}

    def assemble(*chosen):
        return [tiny_assembly(tiny[0], adapters=listed, **options) for listed in chosen]

    (expected,) = run(assemble(lists[0], lists[0]), case)
    (moved,) = run(assemble(lists[0], lists[0]), case, move_after=7)
    assert moved.tokens == expected.tokens
    with pytest.raises(AssertionError, match="files have changed"):
        run(assemble(lists[0], lists[1]), case, move_after=7)


def test_moved_grammar_continues_in_its_state(assemblies):
    with_grammar = create_compiler()

    def guides():
        return compile_guides(with_grammar, "regex", "[a-f]{3}(-[0-9]{2}){5}(xy)*")

    case = {"max_tokens": 30, "temperature": 1.0, "seed": 2, "ignore_eos": False}
    (expected,) = run(assemblies, case, guides=guides)
    (moved,) = run(assemblies, case, move_after=6, guides=guides)
    with_grammar.stop()
    assert moved.tokens == expected.tokens
    assert len(moved.tokens) > 10


def test_request_returns_to_the_engine_that_it_came_from(assemblies, tiny):
    """Its memory was released meanwhile, and is restored."""
    case = {"max_tokens": 24, "temperature": 1.0, "seed": 8}
    (expected,) = run(assemblies, case)
    first = assemblies[0]
    with running(first, lead=1) as one:
        front = Front(one.engine)
        harness = SampleHarness(first, front, one.steps)
        key = harness.submit(PROMPT, **case)
        while len(harness.outputs.get((key, 0), Output()).tokens) < 5:
            harness.step()
        kept = Kept()
        front.take_out(lambda request: True, lambda request, blocks: kept)
        one.steps.unbound()
        until(lambda: kept.requests, "the request")
        release(front, kept, first)
        front.put_back(kept.requests[0])
        (output,) = harness.collect(key, 1)
        assert output.tokens == expected.tokens
        assert not first.model_memory.released


def test_ended_samples_stay_ended_when_the_request_comes_back(assemblies):
    first = assemblies[0]
    with running(first, lead=1) as one:
        front = Front(one.engine)
        harness = SampleHarness(first, front, one.steps)
        keys = [harness.submit(PROMPT, max_tokens=30, temperature=1.0, n=2) for _ in range(2)]
        while any(len(harness.outputs.get((key, 1), Output()).tokens) < 3 for key in keys):
            harness.step()
        kept = Kept()
        front.take_out(lambda request: True, lambda request, blocks: kept)
        one.steps.unbound()
        until(lambda: len(kept.requests) == 2, "the requests")
        front.end(keys[0], 0)
        front.abort(keys[1])
        until(lambda: kept.calls == [("end", keys[0], 0), ("abort", keys[1])], "forwarded calls")
        for request in kept.requests:
            front.put_back(request)
        while not harness.outputs[keys[0], 1].finish:
            harness.step()
        assert harness.outputs[keys[0], 1].finish is FinishReason.LENGTH
        assert harness.outputs[keys[0], 0].finish is None
        assert not first.scheduler.has_work


def test_request_fails_if_the_memory_cannot_be_restored(assemblies, monkeypatch):
    from paged_backend.engine.model_memory import MemoryShortage

    first = assemblies[0]
    with running(first) as one:
        front, kept = Front(one.engine), Kept()
        harness = SampleHarness(first, front, one.steps)
        kept.alive = False
        release(front, kept, first)
        restore = first.model_memory.restore

        def fail():
            raise MemoryShortage("1.00 GiB are missing")

        monkeypatch.setattr(first.model_memory, "restore", fail)
        key = harness.submit(PROMPT, max_tokens=4)
        while (key, 0) not in harness.outputs:
            harness.step()
        assert harness.outputs[key, 0].error.code is ErrorCode.UNAVAILABLE
        monkeypatch.setattr(first.model_memory, "restore", restore)
        assert harness.collect(harness.submit(PROMPT, max_tokens=4), 1)[0].tokens


def test_late_requests_go_to_the_engine_that_has_the_others(assemblies):
    first = assemblies[0]
    with running(first) as one:
        front, kept = Front(one.engine), Kept()
        harness = SampleHarness(first, front, one.steps)
        release(front, kept, first)
        key = harness.submit(PROMPT, max_tokens=4)
        until(lambda: kept.requests, "the request")
        assert one.engine.waiting == 0 and first.model_memory.released
        front.abort(key)
        until(lambda: kept.calls == [("abort", key)], "the forwarded call")
        kept.alive = False
        assert harness.collect(harness.submit(PROMPT, max_tokens=4), 1)[0].tokens
        assert not first.model_memory.released


def test_late_request_that_cannot_move_runs_here(assemblies):
    """An embedding ends with its prompt."""
    first = assemblies[0]
    with running(first) as one:
        front, kept = Front(one.engine), Kept()
        release(front, kept, first)
        harness = EngineHarness(first, front, one.steps)
        (output,) = harness.wait(harness.embed(PROMPT))
        assert output.hidden is not None and not kept.requests
        assert not first.model_memory.released


def test_sleep_mode_of_an_engine_whose_requests_were_moved(assemblies):
    first = assemblies[0]
    with running(first) as one:
        front, kept = Front(one.engine), Kept()
        harness = SampleHarness(first, front, one.steps)
        release(front, kept, first)
        assert one.engine.sleep_mode.sleep(0).memory.total == 0
        assert one.engine.sleep_mode.wake().memory.pool > 0
        kept.alive = False
        key = harness.submit(PROMPT, max_tokens=4)
        assert harness.collect(key, 1)[0].tokens


def test_late_request_of_another_process_is_left_to_that_process(assemblies):
    """Its outputs go there, so this engine must not pass it on as its own."""
    first, told = assemblies[0], SimpleQueue()
    with running(first) as one:
        front, kept = Front(one.engine), Kept()
        harness = SampleHarness(first, front, one.steps)
        front.release_memory(kept, lambda request, blocks: told.put(request.key))
        until(lambda: first.model_memory.released, "released memory")
        key = harness.submit(PROMPT, max_tokens=4)
        assert told.get(timeout=60) == key
        assert not kept.requests and first.model_memory.released
        kept.alive = False
        assert harness.collect(harness.submit(PROMPT, max_tokens=4), 1)[0].tokens


class Kept:
    """An engine that keeps what it is asked."""

    alive = True

    def __init__(self):
        self.requests, self.calls = [], []

    def submit(self, request, blocks=()):
        self.requests.append(request)

    def abort(self, key):
        self.calls.append(("abort", key))

    def end(self, key, index):
        self.calls.append(("end", key, index))

    def end_all(self, key):
        self.calls.append(("end_all", key))

    def expire(self, key):
        self.calls.append(("expire", key))
