"""Bad words, logit bias and allowed tokens match transformers' processors, with any kind of step."""

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
from paged_backend.kv.sequence import Sequence
from paged_backend.sampling.sampler import prepare, process_logits, resolve_tokens
from paged_backend.server.service import Service
from tests.support.in_process import TINY, WAIT, running, tiny_assembly
from tests.support.logprobs import Caller, check
from tests.support.pb_utils import PB_UTILS

sync_and_async = pytest.mark.usefixtures("async_scheduling")
VOCAB, LENGTH = 320, 18
ALLOWED = tuple(range(40, 90))


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 6, 17, 40)]


@pytest.fixture(scope="module")
def unconstrained(tiny, prompts):
    """The outputs of the prompts without constraints."""
    with running(tiny_assembly(tiny[0])) as engine:
        return engine.generate(prompts, max_tokens=LENGTH)


def bad_words_of(outputs):
    """Return sequences of one to three tokens that occur in the outputs."""
    return tuple(
        tuple(tokens[index : index + length]) for tokens in outputs for index, length in ((3, 2), (9, 3), (15, 1))
    )


def transformers_outputs(model, prompt, **options):
    """Return all outputs of transformers, with greedy or beam search."""
    model.generation_config.eos_token_id = None
    allowed = options.pop("allowed", None)
    config = GenerationConfig(max_new_tokens=LENGTH, do_sample=False, pad_token_id=0, **options)
    ids = torch.tensor([prompt])
    outputs = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        prefix_allowed_tokens_fn=allowed and (lambda batch, tokens: list(allowed)),
    )
    return outputs[:, len(prompt) :].tolist()


def contains(output, word):
    return any(tuple(output[start : start + len(word)]) == word for start in range(len(output)))


BIASES = {str(token): 40.0 - token / 2 for token in range(50)} | {"7": -100}


def transformers_options(request, bad_words):
    """Return a request's constraints as options of transformers."""
    options = {}
    if "bad_words" in request:
        options["bad_words_ids"] = [list(word) for word in bad_words]
    if "logit_bias" in request:
        options["sequence_bias"] = [[[int(token)], float(bias)] for token, bias in request["logit_bias"].items()]
    if "allowed_token_ids" in request:
        options["allowed"] = request["allowed_token_ids"]
    return options


REQUESTS = [
    {"bad_words": True},
    {"logit_bias": BIASES},
    {"allowed_token_ids": list(ALLOWED)},
    {"bad_words": True, "logit_bias": BIASES},
    {"bad_words": True, "logit_bias": {"41": 3.5, "60": -2}, "allowed_token_ids": list(ALLOWED)},
]


@sync_and_async
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: " ".join(request))
def test_greedy_tokens_match_transformers(tiny, prompts, unconstrained, request_):
    bad_words = bad_words_of(unconstrained) if "bad_words" in request_ else ()
    options = transformers_options(request_, bad_words)
    sampling = {name: value for name, value in request_.items() if name != "bad_words"}
    with running(tiny_assembly(tiny[0])) as engine:
        found = engine.generate(prompts, max_tokens=LENGTH, bad_words=bad_words, **sampling)
    assert found == [transformers_outputs(tiny[1], prompt, **options)[0] for prompt in prompts]
    assert all(one != other for one, other in zip(found, unconstrained, strict=True))


@sync_and_async
def test_overlapping_bad_words(tiny, prompts, unconstrained):
    """Each round bans what the last one generated, so that many bad words share tokens and are almost completed."""
    bad_words, model = [], tiny[1]
    with running(tiny_assembly(tiny[0])) as engine:
        for _ in range(5):
            (found,) = engine.generate(prompts[1:2], max_tokens=LENGTH, bad_words=tuple(bad_words))
            bad = [list(word) for word in bad_words] or None
            assert [found] == transformers_outputs(model, prompts[1], bad_words_ids=bad)
            bad_words += {(found[index], found[index + 1]) for index in range(0, LENGTH - 1, 2)} - set(bad_words)


@sync_and_async
def test_each_row_has_its_own_constraints(tiny, prompts, unconstrained):
    bad_words = bad_words_of(unconstrained)
    requests = [
        {},
        {"bad_words": bad_words},
        {"logit_bias": BIASES},
        {"allowed_token_ids": ALLOWED, "logit_bias": {"41": 1}},
    ]
    with running(tiny_assembly(tiny[0])) as engine:
        single = [engine.generate([prompts[1]], max_tokens=LENGTH, **request)[0] for request in requests]
        keys = [engine.submit(prompts[1], max_tokens=LENGTH, **request) for request in requests]
        assert [output.tokens for output in engine.wait(*keys)] == single
    assert len(set(map(tuple, single))) == len(requests)


@sync_and_async
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "top_p": 0.9, "seed": 5}], ids=["greedy", "sampled"])
def test_samples_respect_constraints_and_keep_raw_logprobs(tiny, prompts, unconstrained, sampling):
    bad_words = bad_words_of(unconstrained)
    with running(tiny_assembly(tiny[0])) as engine:
        engine.submit(
            prompts[2],
            max_tokens=LENGTH,
            n=3,
            bad_words=bad_words,
            allowed_token_ids=list(range(160)),
            logprobs=2,
            **sampling,
        )
        tokens, logprobs, remaining = defaultdict(list), defaultdict(list), 3
        while remaining:
            for delta in engine.steps.get(timeout=WAIT).deltas:
                assert not delta.error
                tokens[delta.sample] += delta.token_ids
                logprobs[delta.sample] += delta.values.get("logprobs", ())
                remaining -= delta.last
    for sample in range(3):
        assert not any(contains(tokens[sample], word) for word in bad_words)
        assert max(tokens[sample]) < 160
        check(tiny[1], prompts[2], tokens[sample], logprobs[sample], 2)


@sync_and_async
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_does_not_change_constrained_outputs(tiny, unconstrained, mode):
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (17, 31, 48, 64, 80)]
    small = {"num_gpu_blocks_override": 27, "max_num_batched_tokens": 64, "swap_space": 0.01, "preemption_mode": mode}
    with running(tiny_assembly(tiny[0])) as engine:
        bad_words = bad_words_of(engine.generate(prompts, max_tokens=LENGTH))
        expected = engine.generate(
            prompts, max_tokens=LENGTH, bad_words=bad_words, allowed_token_ids=list(range(9, 300))
        )
    with running(tiny_assembly(tiny[0], **small)) as engine:
        assert (
            engine.generate(prompts, max_tokens=LENGTH, bad_words=bad_words, allowed_token_ids=list(range(9, 300)))
            == expected
        )
        assert engine.history[-1].stats.preemptions > 0


@pytest.fixture(scope="module")
def without_drafts(tiny, prompts, unconstrained):
    """Prompts, requests, and their outputs for each request without draft tokens."""
    prompts = [*prompts, [11, 12, 13, 14, 15, 16, 17] * 3]
    requests = [{"bad_words": bad_words_of(unconstrained)}, {"logit_bias": BIASES, "allowed_token_ids": ALLOWED}]
    with running(tiny_assembly(tiny[0])) as engine:
        outputs = [engine.generate(prompts, max_tokens=LENGTH, **request) for request in requests]
    return prompts, requests, outputs


@pytest.mark.parametrize("drafter", ["lookup", "itself", "draft"])
def test_draft_tokens_do_not_change_constrained_outputs(tiny, draft, without_drafts, drafter):
    model = {"lookup": None, "itself": str(tiny[0]), "draft": str(draft)}[drafter]
    all_prompts, requests, expected = without_drafts
    options = {"num_speculative_tokens": 3, "speculative_model": model, "prompt_lookup_min": 1}
    with running(tiny_assembly(tiny[0], **options)) as engine:
        assert [engine.generate(all_prompts, max_tokens=LENGTH, **request) for request in requests] == expected
        assert engine.history[-1].stats.draft_tokens > 0


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: " ".join(request))
def test_beams_match_transformers(tiny, prompts, unconstrained, request_):
    bad_words = bad_words_of(unconstrained) if "bad_words" in request_ else ()
    options = transformers_options(request_, bad_words)
    sampling = {name: value for name, value in request_.items() if name != "bad_words"}
    with running(tiny_assembly(tiny[0])) as engine:
        for prompt in prompts[::2]:
            engine.submit(prompt, max_tokens=LENGTH, beam_width=3, n=3, bad_words=bad_words, **sampling)
            outputs, remaining = defaultdict(list), 3
            while remaining:
                for delta in engine.steps.get(timeout=WAIT).deltas:
                    outputs[delta.sample] += delta.token_ids
                    remaining -= delta.last
            expected = transformers_outputs(tiny[1], prompt, num_beams=3, num_return_sequences=3, **options)
            assert [outputs[index] for index in range(3)] == expected


def test_more_beams_than_allowed_tokens(tiny, prompts):
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
    # The prompt contains tokens 1, 2 and 3, which the repetition penalty halves.
    expected[0, :10] = torch.tensor([1, 0.5, 0.5, 0.5, 2, 0.5, -math.inf, -math.inf, -1, 1])
    assert torch.equal(process_logits(logits, prepare([row])), expected)


def test_bad_word_does_not_start_in_prompt():
    """vLLM behaves the same."""
    words = ((2, 9), (2, 3, 9), (3, 9))
    assert process_logits(torch.zeros(1, 40), prepare([draw_of(bad_words=words)])).isfinite().all()
    masked = process_logits(
        torch.zeros(1, 40), prepare([draw_of(generated=(2, 3), bad_words=(*words, (3, 8), (2, 7)))])
    )
    assert (~masked[0].isfinite()).nonzero().flatten().tolist() == [8, 9]


@pytest.mark.parametrize(("sampled", "banned"), [(5, [8, 9]), (6, [9, 10]), (7, [])])
def test_placeholder_token_triggers_bad_words(sampled, banned):
    """-1 is the placeholder. Several bad words end with the same token."""
    rows = [draw_of(generated=(4, -1), bad_words=((5, 8), (5, 9), (4, 6, 9), (6, 9), (6, 10), (3, 7, 12)))]
    batch = resolve_tokens(prepare(rows), lambda tokens: tokens.where(tokens >= 0, sampled))
    masked = process_logits(torch.zeros(1, 40), batch)
    assert (~masked[0].isfinite()).nonzero().flatten().tolist() == banned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constraints_accept_any_float_dtype(dtype):
    masked = process_logits(torch.zeros(2, 40, dtype=dtype), prepare([draw_of(allowed=[3, 39]), draw_of()]))
    assert masked[0].isfinite().nonzero().flatten().tolist() == [3, 39]
    assert masked[1].isfinite().all()


def test_step_without_constraints_prepares_nothing():
    assert prepare([draw_of(), draw_of(temperature=0)]).constraints is None
    inactive = draw_of(generated=(4, 5), min_tokens=2, stop_ids=(7,), bad_words=((4, 9),))
    assert prepare([inactive]).constraints is None


# --- words as text ------------------------------------------------------------------------------------------------


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
    words = {bytes(map(_byte(service), word)) for word in request.bad_words}
    assert words == {b"ab", b" ab", b"c", b" c", b"\n", b" \n"}


def test_word_bias_applies_to_each_token(service, monkeypatch):
    requests = []
    monkeypatch.setattr(service._engine, "deliver", requests.append)
    (a, b) = service._admission._prompts.encode_text("ab")
    sampling = {"word_bias": {"ab": 2, "b": 0.5}, "logit_bias": {str(a): -1}}
    service.submit(Caller(text_input="The sea", sampling_parameters=json.dumps(sampling)))
    (request,) = requests
    assert dict(request.sampling.logit_bias) == {a: 1.0, b: 2.5}


def _byte(service):
    return lambda token: service._assembly.loaded.tokenizer.decode([token]).encode()[0]
