"""Prompt log probabilities match transformers' log_softmax, however the prompt is computed."""

import json
import random

import pytest
import torch

from paged_backend.api.errors import RequestError
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.scheduling.plan import PlanBuilder
from tests.support.callers import serving
from tests.support.in_process import WAIT, byte_tokenizer, running, tiny_assembly
from tests.support.recorded_graphs import CpuCapture

sync_and_async = pytest.mark.usefixtures("async_scheduling")
TOKENIZER = byte_tokenizer()
IDS = TOKENIZER.encode("The sea, é")


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(6)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in (2, 6, 17, 40)]


def check(model, prompt, logprobs, count):
    """Compare the log probabilities of a prompt with the model's own logits."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1].float()
    log_probs = logits.log_softmax(-1)
    assert len(logprobs) == len(prompt) - 1
    for token, row, expected, (own, *others) in zip(prompt[1:], logits, log_probs, logprobs, strict=True):
        best = expected.topk(count).indices.tolist()
        assert [own.token, *(entry.token for entry in others)] == [token, *(other for other in best if other != token)]
        for entry in (own, *others):
            assert entry.logprob == pytest.approx(expected[entry.token].item(), abs=1e-4)
            assert entry.rank == 1 + (row > row[entry.token]).sum().item()


def prompt_logprobs(engine, *keys):
    """Return each request's prompt log probabilities, which arrive in one delta before its first token."""
    remaining, found, started = set(keys), {}, set()
    while remaining:
        for delta in engine.steps.get(timeout=WAIT).deltas:
            assert not delta.error, delta.error
            if delta.prompt_values is not None:
                assert delta.key not in found and delta.key not in started
                found[delta.key] = delta.prompt_values["logprobs"]
            started.update([delta.key] * len(delta.token_ids))
            if delta.finish and delta.sample == 0:
                remaining.discard(delta.key)
    return [found[key] for key in keys]


@sync_and_async
@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_logprobs_match_transformers(tiny, prompts, count, max_tokens):
    """Prompts are prefilled in chunks of at most 16 tokens."""
    with running(tiny_assembly(tiny[0])) as engine:
        keys = [engine.submit(prompt, max_tokens=max_tokens, prompt_logprobs=count) for prompt in prompts]
        for prompt, found in zip(prompts, prompt_logprobs(engine, *keys), strict=True):
            check(tiny[1], prompt, found, count)


@sync_and_async
def test_cached_prompt_is_recomputed_for_prompt_logprobs(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        plain = engine.generate(prompts[3:], max_tokens=3)
        cached = engine.history[-1].stats.cached_tokens
        for _ in range(2):
            (scores,) = prompt_logprobs(engine, engine.submit(prompts[3], max_tokens=3, prompt_logprobs=2))
            check(tiny[1], prompts[3], scores, 2)
        assert engine.generate(prompts[3:], max_tokens=3) == plain
        assert cached == 0
        assert engine.history[-1].stats.cached_tokens == 39  # by the last request, which has no prompt_logprobs


def test_scored_prompt_fills_the_prefix_cache(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        prompt_logprobs(engine, engine.submit(prompts[3], max_tokens=0, prompt_logprobs=0))
        engine.generate(prompts[3:], max_tokens=3)
        assert engine.history[-1].stats.cached_tokens == 39


@sync_and_async
def test_samples_and_beams_score_the_prompt_once(tiny, prompts):
    with running(tiny_assembly(tiny[0], max_num_batched_tokens=64)) as engine:
        for sampling in ({"n": 3, "temperature": 1.0}, {"beam_width": 3, "n": 2}, {"n": 2, "max_tokens": 0}):
            key = engine.submit(prompts[3], **{"max_tokens": 4, "prompt_logprobs": 1} | sampling)
            remaining, scores = sampling["n"], []
            while remaining:
                for delta in engine.steps.get(timeout=WAIT).deltas:
                    assert delta.key == key
                    scores += [delta.prompt_values["logprobs"]] if delta.prompt_values else []
                    remaining -= delta.last
            (logprobs,) = scores
            check(tiny[1], prompts[3], logprobs, 1)


@sync_and_async
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_neither_repeats_nor_drops_logprobs(tiny, mode):
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in (17, 31, 48, 64, 90)]
    small = {"num_gpu_blocks_override": 27, "max_num_batched_tokens": 24, "swap_space": 0.01, "preemption_mode": mode}
    with running(tiny_assembly(tiny[0], **small)) as engine:
        low = [engine.submit(prompt, max_tokens=16, prompt_logprobs=2, priority=1) for prompt in prompts]
        engine.step()
        high = [engine.submit(prompt, max_tokens=4, prompt_logprobs=2) for prompt in prompts[::-1]]
        for prompt, found in zip([*prompts, *prompts[::-1]], prompt_logprobs(engine, *low, *high), strict=True):
            check(tiny[1], prompt, found, 2)
        assert engine.assembly.scheduler.stats.preemptions > 0


@sync_and_async
def test_scored_rows_per_step_are_bounded(tiny, prompts, monkeypatch):
    builders = []

    def builder(*args, **options):
        builders.append(PlanBuilder(*args, **options, max_scored=5))
        return builders[-1]

    monkeypatch.setattr("paged_backend.scheduling.scheduler.PlanBuilder", builder)
    with running(tiny_assembly(tiny[0], max_num_batched_tokens=64)) as engine:
        keys = [engine.submit(prompt, max_tokens=2, prompt_logprobs=1) for prompt in prompts]
        for prompt, found in zip(prompts, prompt_logprobs(engine, *keys), strict=True):
            check(tiny[1], prompt, found, 1)
    scored = [sum(len(chunk.scored) for chunk in builder.chunks) for builder in builders]
    assert max(scored) == 5
    assert sum(scored) == sum(map(len, prompts)) - len(prompts)


@sync_and_async
def test_graph_replay_does_not_change_logprobs(tiny, prompts, monkeypatch):
    """Chunks of one token are replayed like decode steps. Two chunks that end their prompts need all of their rows."""
    capture = CpuCapture(monkeypatch)
    with running(tiny_assembly(tiny[0], max_num_seqs=2, max_num_batched_tokens=2)) as engine:
        keys = [engine.submit(prompt, max_tokens=3, prompt_logprobs=2) for prompt in prompts[:3]]
        for prompt, found in zip(prompts, prompt_logprobs(engine, *keys), strict=False):
            check(tiny[1], prompt, found, 2)
    assert capture.replays


def test_draft_tokens_do_not_change_logprobs(tiny, prompts):
    with running(tiny_assembly(tiny[0], num_speculative_tokens=3, speculative_model=str(tiny[0]))) as engine:
        keys = [engine.submit(prompt, max_tokens=8, prompt_logprobs=2) for prompt in prompts]
        for prompt, found in zip(prompts, prompt_logprobs(engine, *keys), strict=True):
            check(tiny[1], prompt, found, 2)


def test_max_tokens_zero_scores_prompt_only(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        (output,) = engine.wait(engine.submit(prompts[2], max_tokens=0, prompt_logprobs=2))
    check(tiny[1], prompts[2], output.prompt_logprobs, 2)
    assert (output.tokens, output.finish.value) == ([], "length")


def test_max_tokens_zero_requires_prompt_logprobs(tiny):
    limits = tiny_assembly(tiny[0]).limits
    with pytest.raises(RequestError, match=r"max_tokens=0: must be 1\.\.256, or 0 with prompt_logprobs"):
        SamplingParams.parse({"max_tokens": 0}, limits)
    with pytest.raises(RequestError, match=r"prompt_logprobs=21: must be 0\.\.20"):
        SamplingParams.parse({"prompt_logprobs": 21}, limits)


@pytest.fixture(scope="module")
def service(tiny):
    with serving(tiny[0]) as service:
        yield service


def expected_entries(model, ids, count):
    """Return the expected {token: log probability} for each prompt token after the first."""
    with torch.inference_mode():
        log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return [
        {str(token): row[token].item() for token in (following, *row.topk(count).indices.tolist())}
        for following, row in zip(ids[1:], log_probs, strict=True)
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_prompt_logprobs_are_in_the_first_response(service, tiny, stream, max_tokens):
    sampling = {"prompt_logprobs": 2, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    responses = service.call(input_ids=IDS, stream=stream, sampling_parameters=json.dumps(sampling)).all()
    assert ["prompt_logprobs" in response for response in responses] == [True] + [False] * (len(responses) - 1)
    first, *others = json.loads(responses[0]["prompt_logprobs"][0])
    assert first is None
    for found, expected in zip(others, expected_entries(tiny[1], IDS, 2), strict=True):
        assert list(found) == list(expected)
        assert [entry["logprob"] for entry in found.values()] == pytest.approx(list(expected.values()), abs=1e-4)
        assert all(entry["decoded_token"] == TOKENIZER.decode([int(token)]) for token, entry in found.items())


def test_single_token_prompt_has_no_prompt_logprobs(service):
    sampling = '{"prompt_logprobs": 2, "max_tokens": 1}'
    assert service.ask(input_ids=[5], sampling_parameters=sampling)["prompt_logprobs"] == [b"[null]"]
