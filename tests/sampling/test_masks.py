"""Token bitmasks of guides and allowed tokens, with any kind of step."""

import random
import time
from collections import defaultdict

import numpy as np
import pytest
import torch

from paged_backend.api.errors import ErrorCode
from paged_backend.api.guide import GuideError
from paged_backend.api.request import FinishReason, GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.kv.sequence import Sequence
from paged_backend.sampling.masks import Mask, apply_mask, build_mask
from paged_backend.scheduling.budgets import MASK_SECONDS
from tests.support.in_process import WAIT, running, tiny_assembly

sync_and_async = pytest.mark.usefixtures("async_scheduling")
VOCAB, END = 320, 319


class Stepping:
    """Allows tokens whose id is one more than the previous one modulo 7, and only END after `most` tokens."""

    num_words = VOCAB // 32

    def __init__(self, most=99, breaks_at=99):
        self.tokens, self.most, self.breaks_at = [], most, breaks_at

    @property
    def seen(self):
        return len(self.tokens)

    def advance(self, tokens):
        assert min(tokens) >= 0, "a placeholder token"
        self.tokens += tokens

    def allowed(self):
        if len(self.tokens) >= self.most:
            return [END]
        residue = (self.tokens[-1] + 1) % 7 if self.tokens else 0
        return [token for token in range(300) if token % 7 == residue]

    def fill(self, words):
        if len(self.tokens) >= self.breaks_at:
            raise GuideError("regex: no token can follow")
        bits = np.zeros(VOCAB, dtype=np.uint8)
        bits[self.allowed()] = 1
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)


class Recording(Stepping):
    """A guide that notes in `events` that it has computed a mask. seconds: CPU time of each."""

    def __init__(self, events, name, seconds=0.0):
        super().__init__()
        self.events, self.name, self.seconds = events, name, seconds

    def advance(self, tokens):
        super().advance(tokens)
        self.events.append(self.name)
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass


def submit(engine, prompt, guides, **sampling):
    return engine.submit(prompt, guides=guides, **{"max_tokens": 12, "stop_token_ids": [END]} | sampling)


def expected(model, prompt, count, most=99):
    """Return the output of a guided request, from logits that are recomputed by the model for each token."""
    guide = Stepping(most)
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *guide.tokens]])).logits[0, -1]
        allowed = guide.allowed()
        guide.advance([allowed[int(logits[allowed].argmax())]])
        if guide.tokens[-1] == END:
            break
    return guide.tokens


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(8)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in (1, 9, 18, 40)]


@sync_and_async
def test_guided_rows_sample_allowed_tokens_and_others_are_unchanged(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        (plain,) = engine.generate([prompts[1]], max_tokens=12)
        keys = [submit(engine, prompt, [Stepping()]) for prompt in prompts]
        beside = engine.submit(prompts[1], max_tokens=12)
        outputs = engine.wait(*keys, beside)
    assert outputs.pop().tokens == plain
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.tokens == expected(tiny[1], prompt, 12)
        assert output.finish is FinishReason.LENGTH


@sync_and_async
def test_expensive_guides_delay_no_other_request(tiny, prompts):
    """Each step computes the cheap guide's mask, and one of the expensive ones."""
    events = []
    with running(tiny_assembly(tiny[0])) as engine:
        cheap = submit(engine, prompts[1], [Recording(events, "cheap")], max_tokens=30)
        costly = [submit(engine, prompt, [Recording(events, "costly", MASK_SECONDS)]) for prompt in prompts]
        outputs = engine.wait(cheap, *costly)
    for prompt, output in zip([prompts[1], *prompts], outputs, strict=True):
        assert output.tokens == expected(tiny[1], prompt, len(output.tokens))
    assert [len(output.tokens) for output in outputs] == [30, 12, 12, 12, 12]
    masks = " ".join(events)
    assert masks.count("costly") == 4 * 11
    assert "costly costly" not in masks[: masks.rindex("cheap")]


@sync_and_async
@pytest.mark.parametrize("min_tokens", [0, 8])
def test_complete_output_ends_before_min_tokens(tiny, prompts, min_tokens):
    with running(tiny_assembly(tiny[0])) as engine:
        (output,) = engine.wait(submit(engine, prompts[1], [Stepping(most=5)], min_tokens=min_tokens))
    assert output.tokens == expected(tiny[1], prompts[1], 12, most=5)
    assert (len(output.tokens), output.tokens[-1], output.finish) == (6, END, FinishReason.STOP)


def test_min_tokens_masks_stop_tokens_unless_nothing_else_is_left():
    assert masked_tokens([3, END], min_tokens=4, generated=3) == [3]
    assert masked_tokens([3, END], min_tokens=4, generated=4) == [3, END]
    assert masked_tokens([END], min_tokens=4, generated=3) == [END]


def masked_tokens(allowed, *, min_tokens, generated):
    class Fixed(Stepping):
        def allowed(self):
            return allowed

    request = GenerateRequest(
        0, (1,), SamplingParams(min_tokens=min_tokens, max_tokens=9), 0, frozenset([END, 10_000]), guides=(Fixed(),)
    )
    request.guides[0].advance([2] * generated)
    mask = build_mask([(0, Sequence(request, [1, *[2] * generated], []), 1 + generated)], {})
    (row,) = apply_mask(torch.zeros(1, VOCAB), mask)
    return row.isfinite().nonzero()[:, 0].tolist()


@sync_and_async
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_does_not_change_guided_outputs(tiny, mode):
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in (17, 31, 48, 64, 90)]
    small = {"num_gpu_blocks_override": 27, "max_num_batched_tokens": 64, "swap_space": 0.01, "preemption_mode": mode}
    with running(tiny_assembly(tiny[0], **small)) as engine:
        keys = [submit(engine, prompt, [Stepping()], max_tokens=16) for prompt in prompts]
        outputs = engine.wait(*keys)
        assert engine.history[-1].stats.preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.tokens == expected(tiny[1], prompt, 16)


@sync_and_async
def test_every_sample_has_its_own_guide(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        guides = [Stepping(), Stepping(most=4), Stepping()]
        submit(engine, prompts[2], guides, n=3, temperature=2.0, seed=5)
        tokens, remaining = defaultdict(list), 3
        while remaining:
            for delta in engine.steps.get(timeout=WAIT).deltas:
                tokens[delta.sample] += delta.token_ids
                remaining -= delta.last
    assert tokens[0] != tokens[2]
    assert [len(tokens[sample]) for sample in range(3)] == [12, 5, 12]
    for sample in range(3):
        assert all(token % 7 == index % 7 for index, token in enumerate(tokens[sample]) if token != END)


def test_no_draft_tokens_for_guided_sequences(tiny, prompts):
    options = {"num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with running(tiny_assembly(tiny[0], **options)) as engine:
        (output,) = engine.wait(submit(engine, [11, 12, 13] * 5, [Stepping()]))
        assert engine.history[-1].stats.draft_tokens == 0
    assert output.tokens == expected(tiny[1], [11, 12, 13] * 5, 12)


@sync_and_async
def test_logprobs_are_computed_from_raw_logits(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        (output,) = engine.wait(submit(engine, prompts[1], [Stepping()], logprobs=2))
    with torch.inference_mode():
        logits = tiny[1](torch.tensor([[*prompts[1], *output.tokens]])).logits[0, len(prompts[1]) - 1 : -1]
    for token, row, (sampled, *_) in zip(output.tokens, logits.log_softmax(-1), output.logprobs, strict=True):
        assert (sampled.token, sampled.logprob) == (token, pytest.approx(row[token].item(), abs=1e-4))


@sync_and_async
@pytest.mark.parametrize("n", [1, 3])
def test_failing_guide_fails_only_its_request(tiny, prompts, n):
    with running(tiny_assembly(tiny[0])) as engine:
        beside = submit(engine, prompts[0], [Stepping()])
        failing = submit(engine, prompts[1], [Stepping(breaks_at=3) for _ in range(n)], n=n, temperature=1.0)
        engine.wait(failing)
        (other,) = engine.wait(beside)
    error = engine.outputs[failing].error
    assert (error.code, str(error)) == (ErrorCode.INVALID_ARGUMENT, "INVALID_ARGUMENT: regex: no token can follow")
    assert other.tokens == expected(tiny[1], prompts[0], 12)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 320])
def test_tokens_beyond_the_mask_are_not_allowed(vocab):
    rng = np.random.default_rng(vocab)
    bits = rng.integers(0, 2, (3, 96), dtype=np.uint8)
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    padded = np.pad(bits, ((0, 0), (0, max(0, vocab - 96))))[:, :vocab]
    allowed = apply_mask(torch.zeros(3, vocab), Mask(torch.arange(3), words)).isfinite()
    assert allowed.tolist() == padded.astype(bool).tolist()


@pytest.mark.parametrize("rows", [[0, 1, 2], [2], [1, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_mask_does_not_modify_its_input(rows, dtype):
    logits = torch.randn(3, 64, dtype=dtype)
    before = logits.clone()
    masked = apply_mask(logits, Mask(torch.tensor(rows), torch.tensor([[1, -(2**31)]] * len(rows), dtype=torch.int32)))
    assert torch.equal(logits, before)
    for row in range(3):
        kept = [0, 63] if row in rows else range(64)
        assert masked[row].isfinite().nonzero()[:, 0].tolist() == list(kept)
        assert torch.equal(masked[row, list(kept)], logits[row, list(kept)])


@sync_and_async
def test_other_constraints_apply_to_guided_outputs(tiny, prompts):
    """A bad word, and allowed_token_ids."""
    (first, *_) = expected(tiny[1], prompts[1], 12)
    with running(tiny_assembly(tiny[0])) as engine:
        without = submit(engine, prompts[1], [Stepping()], bad_words=((first,),), max_tokens=1)
        allowed = submit(engine, prompts[1], [Stepping()], allowed_token_ids=[7, 8, 16], max_tokens=9)
        (first_output, second_output) = engine.wait(without, allowed)
    assert first_output.tokens[0] != first
    assert first_output.tokens[0] % 7 == 0
    assert second_output.tokens == [7, 8, 16]
    assert "no token is left: allowed_token_ids exclude every possible next token" in str(second_output.error)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("masked", [1, 3])
def test_masked_logits_have_the_strides_of_logits(rows, masked):
    """Kernels are compiled for the strides of logits, also if the vocabulary is no multiple of 32 tokens."""
    logits = torch.zeros(rows, 331)
    mask = Mask(torch.arange(min(rows, masked)), torch.full((min(rows, masked), 11), -1, dtype=torch.int32), ())
    assert apply_mask(logits, mask).stride() == logits.stride()
