"""Tokens that requests forbid and favour: the outputs of transformers' own processors, however steps are run."""

import json
import math
import random
from collections import defaultdict

import pytest
import torch
from transformers import GenerationConfig

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest, bitmask
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.sampling.sampler import prepare, process_logits, resolve_tokens
from paged_backend.scheduling.sequence import Sequence
from paged_backend.server.service import Service
from tests.support.in_process import TINY, WAIT, running, tiny_assembly
from tests.support.logprobs import Caller, check
from tests.support.pb_utils import PB_UTILS

overlapped_too = pytest.mark.usefixtures("planning")
VOCAB, LENGTH = 320, 24
SOME = tuple(range(40, 90))


@pytest.fixture(scope="module")
def prompts():
    rnd = random.Random(7)
    return [[rnd.randrange(3, VOCAB) for _ in range(length)] for length in (1, 6, 17, 40)]


@pytest.fixture(scope="module")
def free(tiny, prompts):
    """What the prompts give without constraints."""
    with running(tiny_assembly(tiny[0])) as engine:
        return engine.generate(prompts, max_tokens=LENGTH)


def runs_of(outputs):
    """Runs of one to three tokens, each of which some output has."""
    return tuple(tuple(one[index : index + length]) for one in outputs for index, length in ((3, 2), (9, 3), (15, 1)))


def alone(model, prompt, **options):
    """Greedily, or with beams, by transformers: every output."""
    model.generation_config.eos_token_id = None
    allowed = options.pop("allowed", None)
    config = GenerationConfig(max_new_tokens=LENGTH, do_sample=False, pad_token_id=0, **options)
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        prefix_allowed_tokens_fn=allowed and (lambda batch, tokens: list(allowed)),
    )
    return found[:, len(prompt) :].tolist()


def has(output, run):
    return any(tuple(output[start : start + len(run)]) == run for start in range(len(output)))


BIASES = {str(token): 40.0 - token / 2 for token in range(50)} | {"7": -100}


def as_transformers(request, runs):
    """The request's constraints by transformers' names."""
    options = {}
    if "bad_words" in request:
        options["bad_words_ids"] = [list(run) for run in runs]
    if "logit_bias" in request:
        options["sequence_bias"] = [[[int(token)], float(bias)] for token, bias in request["logit_bias"].items()]
    if "allowed_token_ids" in request:
        options["allowed"] = request["allowed_token_ids"]
    return options


REQUESTS = [
    {"bad_words": True},
    {"logit_bias": BIASES},
    {"allowed_token_ids": list(SOME)},
    {"bad_words": True, "logit_bias": BIASES},
    {"bad_words": True, "logit_bias": {"41": 3.5, "60": -2}, "allowed_token_ids": list(SOME)},
]


@overlapped_too
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: " ".join(request))
def test_greedy_tokens_match_transformers(tiny, prompts, free, request_):
    runs = runs_of(free) if "bad_words" in request_ else ()
    options = as_transformers(request_, runs)
    sampling = {name: value for name, value in request_.items() if name != "bad_words"}
    with running(tiny_assembly(tiny[0])) as engine:
        found = engine.generate(prompts, max_tokens=LENGTH, bad_words=runs, **sampling)
    assert found == [alone(tiny[1], prompt, **options)[0] for prompt in prompts]
    assert all(one != other for one, other in zip(found, free, strict=True))


@overlapped_too
def test_overlapping_bad_words(tiny, prompts, free):
    """Each round forbids what the last one gave, so that many runs share tokens and are nearly completed."""
    runs, model = [], tiny[1]
    with running(tiny_assembly(tiny[0])) as engine:
        for _ in range(6):
            (found,) = engine.generate(prompts[1:2], max_tokens=LENGTH, bad_words=tuple(runs))
            bad = [list(run) for run in runs] or None
            assert [found] == alone(model, prompts[1], bad_words_ids=bad)
            runs += {(found[index], found[index + 1]) for index in range(0, LENGTH - 1, 2)} - set(runs)


@overlapped_too
def test_each_row_has_its_own_constraints(tiny, prompts, free):
    runs = runs_of(free)
    asked = [{}, {"bad_words": runs}, {"logit_bias": BIASES}, {"allowed_token_ids": SOME, "logit_bias": {"41": 1}}]
    with running(tiny_assembly(tiny[0])) as engine:
        apart = [engine.generate([prompts[1]], max_tokens=LENGTH, **one)[0] for one in asked]
        keys = [engine.submit(prompts[1], max_tokens=LENGTH, **one) for one in asked]
        assert [one.tokens for one in engine.wait(*keys)] == apart
    assert len(set(map(tuple, apart))) == len(asked)


@overlapped_too
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "top_p": 0.9, "seed": 5}], ids=["greedy", "sampled"])
def test_samples_respect_constraints_and_keep_raw_logprobs(tiny, prompts, free, sampling):
    runs = runs_of(free)
    with running(tiny_assembly(tiny[0])) as engine:
        engine.submit(
            prompts[2],
            max_tokens=LENGTH,
            n=3,
            bad_words=runs,
            allowed_token_ids=list(range(160)),
            logprobs=2,
            **sampling,
        )
        tokens, told, left = defaultdict(list), defaultdict(list), 3
        while left:
            for delta in engine.steps.get(timeout=WAIT).deltas:
                assert not delta.error
                tokens[delta.sample] += delta.token_ids
                told[delta.sample] += delta.logprobs
                left -= delta.last
    for sample in range(3):
        assert not any(has(tokens[sample], run) for run in runs)
        assert max(tokens[sample]) < 160
        check(tiny[1], prompts[2], tokens[sample], told[sample], 2)


@overlapped_too
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_does_not_change_constrained_outputs(tiny, free, mode):
    rnd = random.Random(1)
    prompts = [[rnd.randrange(3, VOCAB) for _ in range(length)] for length in (17, 31, 48, 64, 80)]
    small = {"num_gpu_blocks_override": 27, "max_num_batched_tokens": 64, "swap_space": 0.01, "preemption_mode": mode}
    with running(tiny_assembly(tiny[0])) as engine:
        runs = runs_of(engine.generate(prompts, max_tokens=LENGTH))
        expected = engine.generate(prompts, max_tokens=LENGTH, bad_words=runs, allowed_token_ids=list(range(9, 300)))
    with running(tiny_assembly(tiny[0], **small)) as engine:
        assert (
            engine.generate(prompts, max_tokens=LENGTH, bad_words=runs, allowed_token_ids=list(range(9, 300)))
            == expected
        )
        assert engine.history[-1].stats.preemptions > 0


@pytest.mark.parametrize("guesser", ["lookup", "itself", "draft"])
def test_draft_tokens_do_not_change_constrained_outputs(tiny, draft, prompts, free, guesser):
    model = {"lookup": None, "itself": str(tiny[0]), "draft": str(draft)}[guesser]
    every = [*prompts, [11, 12, 13, 14, 15, 16, 17] * 3]
    asked = [{"bad_words": runs_of(free)}, {"logit_bias": BIASES, "allowed_token_ids": SOME}]
    with running(tiny_assembly(tiny[0])) as engine:
        expected = [engine.generate(every, max_tokens=LENGTH, **one) for one in asked]
    options = {"num_speculative_tokens": 3, "speculative_model": model, "prompt_lookup_min": 1}
    with running(tiny_assembly(tiny[0], **options)) as engine:
        assert [engine.generate(every, max_tokens=LENGTH, **one) for one in asked] == expected
        assert engine.history[-1].stats.draft_tokens > 0


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: " ".join(request))
def test_beams_match_transformers(tiny, prompts, free, request_):
    runs = runs_of(free) if "bad_words" in request_ else ()
    options = as_transformers(request_, runs)
    sampling = {name: value for name, value in request_.items() if name != "bad_words"}
    with running(tiny_assembly(tiny[0])) as engine:
        for prompt in prompts:
            engine.submit(prompt, max_tokens=LENGTH, beam_width=3, n=3, bad_words=runs, **sampling)
            outputs, left = defaultdict(list), 3
            while left:
                for delta in engine.steps.get(timeout=WAIT).deltas:
                    outputs[delta.sample] += delta.token_ids
                    left -= delta.last
            expected = alone(tiny[1], prompt, num_beams=3, num_return_sequences=3, **options)
            assert [outputs[index] for index in range(3)] == expected


def test_more_beams_than_allowed_tokens(tiny, prompts):
    """Fewer tokens than beams."""
    with running(tiny_assembly(tiny[0])) as engine:
        (output,) = engine.wait(engine.submit(prompts[1], max_tokens=6, beam_width=4, allowed_token_ids=[5]))
    assert output.tokens == [5] * 6


# --- one step --------------------------------------------------------------------------------------------------------


def draw_of(tokens=(1, 2, 3), generated=(), bad_words=(), allowed=None, stop_ids=(), **sampling):
    allowed = allowed and bitmask(allowed, 40)
    params = SamplingParams(**sampling)
    request = GenerateRequest(0, tokens, params, 0, frozenset(stop_ids), bad_words=bad_words, allowed=allowed)
    return Sequence(request, [*tokens, *generated], []), len(tokens) + len(generated)


def test_bias_is_added_before_penalties_and_masks_remain():
    logits = torch.ones(1, 40)
    row = draw_of(
        generated=(4, 5), bad_words=((6,),), allowed=range(10), stop_ids=(7,), min_tokens=3,
        logit_bias=((4, 3.0), (6, 9.0), (7, 9.0), (8, -2.0), (30, 9.0)), repetition_penalty=2.0,
    )  # fmt: skip
    expected = torch.full((1, 40), -math.inf)
    # The prompt has 1, 2 and 3.
    expected[0, :10] = torch.tensor([1, 0.5, 0.5, 0.5, 2, 0.5, -math.inf, -math.inf, -1, 1])
    assert torch.equal(process_logits(logits, prepare([row])), expected)


def test_bad_word_does_not_start_in_prompt():
    """As in vLLM."""
    words = ((2, 9), (2, 3, 9), (3, 9))
    assert process_logits(torch.zeros(1, 40), prepare([draw_of(bad_words=words)])).isfinite().all()
    found = process_logits(torch.zeros(1, 40), prepare([draw_of(generated=(2, 3), bad_words=(*words, (3, 8), (2, 7)))]))
    assert (~found[0].isfinite()).nonzero().flatten().tolist() == [8, 9]


@pytest.mark.parametrize(("drawn", "forbidden"), [(5, [8, 9]), (6, [9, 10]), (7, [])])
def test_placeholder_token_triggers_bad_words(drawn, forbidden):
    """-1 stands for it; several words end with one token."""
    rows = [draw_of(generated=(4, -1), bad_words=((5, 8), (5, 9), (4, 6, 9), (6, 9), (6, 10), (3, 7, 12)))]
    batch = resolve_tokens(prepare(rows), lambda tokens: tokens.where(tokens >= 0, drawn))
    found = process_logits(torch.zeros(1, 40), batch)
    assert (~found[0].isfinite()).nonzero().flatten().tolist() == forbidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constraints_accept_any_float_dtype(dtype):
    found = process_logits(torch.zeros(2, 40, dtype=dtype), prepare([draw_of(allowed=[3, 39]), draw_of()]))
    assert found[0].isfinite().nonzero().flatten().tolist() == [3, 39]
    assert found[1].isfinite().all()


def test_step_without_constraints_prepares_nothing():
    assert prepare([draw_of(), draw_of(temperature=0)]).constraints is None
    out_of_reach = draw_of(generated=(4, 5), min_tokens=2, stop_ids=(7,), bad_words=((4, 9),))
    assert prepare([out_of_reach]).constraints is None


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def service(tiny):
    service = Service(EngineConfig.from_options(TINY | {"model": str(tiny[0])}), PB_UTILS, {"model": "tiny"})
    yield service
    service.stop()


def test_bad_word_applies_with_and_without_leading_space(service, monkeypatch):
    requests = []
    monkeypatch.setattr(service._engine, "deliver", requests.append)
    caller = Caller(text_input="The sea", sampling_parameters=json.dumps({"bad_words": [" ab", "ab", "c", "\n"]}))
    service.submit(caller)
    (request,) = requests
    words = {bytes(map(_byte(service), run)) for run in request.bad_words}
    assert words == {b"ab", b" ab", b"c", b" c", b"\n", b" \n"}


def test_word_bias_applies_to_each_token(service, monkeypatch):
    requests = []
    monkeypatch.setattr(service._engine, "deliver", requests.append)
    (a, b) = service._encode("ab")
    sampling = {"word_bias": {"ab": 2, "b": 0.5}, "logit_bias": {str(a): -1}}
    service.submit(Caller(text_input="The sea", sampling_parameters=json.dumps(sampling)))
    (request,) = requests
    assert dict(request.sampling.logit_bias) == {a: 1.0, b: 2.5}


def _byte(service):
    return lambda token: service._tokenizer.decode([token]).encode()[0]
