"""Log probabilities of a prompt's own tokens: those of transformers' log_softmax, however the prompt was computed."""

import json
import random

import pytest
import torch

from paged_backend.api.errors import RequestError
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine import runner_builder
from paged_backend.scheduling import plan
from tests.support.callers import serving
from tests.support.in_process import WAIT, byte_tokenizer, running, tiny_assembly

overlapped_too = pytest.mark.usefixtures("planning")
TOKENIZER = byte_tokenizer()
IDS = TOKENIZER.encode("The sea, é")


@pytest.fixture(scope="module")
def prompts():
    rnd = random.Random(6)
    return [[rnd.randrange(3, 320) for _ in range(length)] for length in (2, 6, 17, 40)]


def check(model, prompt, told, count):
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1].float()
    log_probs = logits.log_softmax(-1)
    assert len(told) == len(prompt) - 1
    for token, row, expected, (own, *others) in zip(prompt[1:], logits, log_probs, told, strict=True):
        best = expected.topk(count).indices.tolist()
        assert [own.token, *(one.token for one in others)] == [token, *(one for one in best if one != token)]
        for one in (own, *others):
            assert one.logprob == pytest.approx(expected[one.token].item(), abs=1e-4)
            assert one.rank == 1 + (row > row[one.token]).sum().item()


def told(engine, *keys):
    """Of each request the log probabilities of its prompt, all in one delta, which comes before its first token."""
    left, found, begun = set(keys), {}, set()
    while left:
        for delta in engine.steps.get(timeout=WAIT).deltas:
            assert not delta.error, delta.error
            if delta.prompt_logprobs is not None:
                assert delta.key not in found and delta.key not in begun
                found[delta.key] = delta.prompt_logprobs
            begun.update([delta.key] * len(delta.token_ids))
            if delta.finish and delta.sample == 0:
                left.discard(delta.key)
    return [found[key] for key in keys]


@overlapped_too
@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_logprobs_match_transformers(tiny, prompts, count, max_tokens):
    """In chunks of 16 tokens at the most."""
    with running(tiny_assembly(tiny[0])) as engine:
        keys = [engine.submit(prompt, max_tokens=max_tokens, prompt_logprobs=count) for prompt in prompts]
        for prompt, found in zip(prompts, told(engine, *keys), strict=True):
            check(tiny[1], prompt, found, count)


@overlapped_too
def test_cached_prompt_is_recomputed_for_prompt_logprobs(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        plain = engine.generate(prompts[3:], max_tokens=3)
        found = engine.history[-1].stats.cached_tokens
        for _ in range(2):
            (scores,) = told(engine, engine.submit(prompts[3], max_tokens=3, prompt_logprobs=2))
            check(tiny[1], prompts[3], scores, 2)
        assert engine.generate(prompts[3:], max_tokens=3) == plain
        assert found == 0
        assert engine.history[-1].stats.cached_tokens == 39  # by the last, which does not ask


def test_scored_prompt_fills_the_prefix_cache(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        told(engine, engine.submit(prompts[3], max_tokens=0, prompt_logprobs=0))
        engine.generate(prompts[3:], max_tokens=3)
        assert engine.history[-1].stats.cached_tokens == 39


@overlapped_too
def test_samples_and_beams_score_the_prompt_once(tiny, prompts):
    with running(tiny_assembly(tiny[0], max_num_batched_tokens=64)) as engine:
        for wanted in ({"n": 3, "temperature": 1.0}, {"beam_width": 3, "n": 2}, {"n": 2, "max_tokens": 0}):
            key = engine.submit(prompts[3], **{"max_tokens": 4, "prompt_logprobs": 1} | wanted)
            left, scores = wanted["n"], []
            while left:
                for delta in engine.steps.get(timeout=WAIT).deltas:
                    assert delta.key == key
                    scores += [delta.prompt_logprobs] if delta.prompt_logprobs else []
                    left -= delta.last
            (one,) = scores
            check(tiny[1], prompts[3], one, 1)


@overlapped_too
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_neither_repeats_nor_drops_logprobs(tiny, mode):
    rnd = random.Random(1)
    prompts = [[rnd.randrange(3, 320) for _ in range(length)] for length in (17, 31, 48, 64, 90)]
    small = {"num_gpu_blocks_override": 27, "max_num_batched_tokens": 24, "swap_space": 0.01, "preemption_mode": mode}
    with running(tiny_assembly(tiny[0], **small)) as engine:
        low = [engine.submit(prompt, max_tokens=16, prompt_logprobs=2, priority=1) for prompt in prompts]
        engine.step()
        high = [engine.submit(prompt, max_tokens=4, prompt_logprobs=2) for prompt in prompts[::-1]]
        for prompt, found in zip([*prompts, *prompts[::-1]], told(engine, *low, *high), strict=True):
            check(tiny[1], prompt, found, 2)
        assert engine.assembly.scheduler.stats.preemptions > 0


@overlapped_too
def test_scored_rows_per_step_are_bounded(tiny, prompts, monkeypatch):
    drafts = []

    def draft(*args):
        drafts.append(plan.Draft(*args, scores=5))
        return drafts[-1]

    monkeypatch.setattr("paged_backend.scheduling.scheduler.Draft", draft)
    with running(tiny_assembly(tiny[0], max_num_batched_tokens=64)) as engine:
        keys = [engine.submit(prompt, max_tokens=2, prompt_logprobs=1) for prompt in prompts]
        for prompt, found in zip(prompts, told(engine, *keys), strict=True):
            check(tiny[1], prompt, found, 1)
    scored = [sum(len(chunk.scored) for chunk in one.chunks) for one in drafts]
    assert max(scored) == 5
    assert sum(scored) == sum(map(len, prompts)) - len(prompts)


@overlapped_too
def test_graph_replay_does_not_change_logprobs(tiny, prompts, monkeypatch):
    """Chunks of a token are replayed as decode steps are; two that end their prompts want all of their rows."""
    monkeypatch.setattr(runner_builder, "graph_capture", lambda device: lambda step: step)
    with running(tiny_assembly(tiny[0], max_num_seqs=2, max_num_batched_tokens=2)) as engine:
        keys = [engine.submit(prompt, max_tokens=3, prompt_logprobs=2) for prompt in prompts[:3]]
        for prompt, found in zip(prompts, told(engine, *keys), strict=False):
            check(tiny[1], prompt, found, 2)


def test_draft_tokens_do_not_change_logprobs(tiny, prompts):
    with running(tiny_assembly(tiny[0], num_speculative_tokens=3, speculative_model=str(tiny[0]))) as engine:
        keys = [engine.submit(prompt, max_tokens=8, prompt_logprobs=2) for prompt in prompts]
        for prompt, found in zip(prompts, told(engine, *keys), strict=True):
            check(tiny[1], prompt, found, 2)


def test_max_tokens_zero_scores_prompt_only(tiny, prompts, monkeypatch):
    monkeypatch.setattr("paged_kernels.ops.sample", lambda logits, draws: torch.zeros(len(logits), dtype=torch.int64))
    with running(tiny_assembly(tiny[0])) as engine:
        (output,) = engine.wait(engine.submit(prompts[2], max_tokens=0, prompt_logprobs=0))
    assert (output.tokens, output.finish.value) == ([], "length")


def test_max_tokens_zero_requires_prompt_logprobs(tiny):
    limits = tiny_assembly(tiny[0]).limits
    with pytest.raises(RequestError, match=r"max_tokens=0: must be 1\.\.256, or 0 with prompt_logprobs"):
        SamplingParams.parse({"max_tokens": 0}, limits)
    with pytest.raises(RequestError, match=r"prompt_logprobs=21: must be 0\.\.20"):
        SamplingParams.parse({"prompt_logprobs": 21}, limits)


@pytest.fixture(scope="module")
def service(tiny):
    with serving(tiny[0]) as made:
        yield made


def entries(model, ids, count):
    with torch.inference_mode():
        log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return [
        {str(token): row[token].item() for token in (following, *row.topk(count).indices.tolist())}
        for following, row in zip(ids[1:], log_probs, strict=True)
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_prompt_logprobs_are_in_the_first_response(service, tiny, stream, max_tokens):
    wanted = {"prompt_logprobs": 2, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    responses = service.call(input_ids=IDS, stream=stream, sampling_parameters=json.dumps(wanted)).all()
    assert ["prompt_logprobs" in one for one in responses] == [True] + [False] * (len(responses) - 1)
    first, *others = json.loads(responses[0]["prompt_logprobs"][0])
    assert first is None
    for found, expected in zip(others, entries(tiny[1], IDS, 2), strict=True):
        assert list(found) == list(expected)
        assert [one["logprob"] for one in found.values()] == pytest.approx(list(expected.values()), abs=1e-4)
        assert all(one["decoded_token"] == TOKENIZER.decode([int(token)]) for token, one in found.items())


def test_single_token_prompt_has_no_prompt_logprobs(service):
    wanted = '{"prompt_logprobs": 2, "max_tokens": 1}'
    assert service.ask(input_ids=[5], sampling_parameters=wanted)["prompt_logprobs"] == [b"[null]"]
