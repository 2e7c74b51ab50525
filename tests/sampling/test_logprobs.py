"""Log probabilities match transformers' log_softmax over prompt and output, with any kind of step."""

import random
from collections import defaultdict

import pytest
import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.token_outputs import LOGPROBS
from paged_backend.sampling import logprobs
from paged_backend.server.service import Service
from tests.support.in_process import TINY, WAIT, running, tiny_assembly
from tests.support.logprobs import Caller, check
from tests.support.pb_utils import PB_UTILS
from tests.support.recorded_graphs import CpuCapture

sync_and_async = pytest.mark.usefixtures("async_scheduling")
REPEATING = [11, 12, 13, 14, 15, 16, 17] * 3


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(5)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in (1, 6, 17, 40)]


GREEDY = {}
SAMPLED = {"temperature": 1.5, "seed": 3}
FILTERED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 9}
PENALISED = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "temperature": 0.7, "seed": 4}
BANNED = {"min_tokens": 5, "stop_token_ids": list(range(160))}


@sync_and_async
@pytest.mark.parametrize(
    ("sampling", "count"),
    [(GREEDY, 0), (GREEDY, 1), (SAMPLED, 20), (FILTERED, 5), (PENALISED, 5), (BANNED, 5)],
    ids=["greedy, sampled token only", "greedy", "sampled", "filtered", "penalised", "banned"],
)
def test_values_and_ranks_match_raw_logits(tiny, prompts, sampling, count):
    with running(tiny_assembly(tiny[0])) as engine:
        keys = [engine.submit(prompt, max_tokens=8, logprobs=count, **sampling) for prompt in prompts]
        for prompt, output in zip(prompts, engine.wait(*keys), strict=True):
            check(tiny[1], prompt, output.tokens, output.logprobs, count)


def test_sampled_token_outside_top_logprobs_has_true_rank(tiny):
    """At high temperature most sampled tokens are not among the top tokens."""
    with running(tiny_assembly(tiny[0])) as engine:
        (output,) = engine.wait(engine.submit([5, 6], max_tokens=20, logprobs=2, temperature=50, seed=1))
    assert max(sampled.rank for sampled, *_ in output.logprobs) > 20
    assert max(map(len, output.logprobs)) == 3


@sync_and_async
def test_requests_of_a_step_get_different_counts(tiny, prompts):
    counts = [None, 3, 0, 20]
    with running(tiny_assembly(tiny[0])) as engine:
        plain = engine.generate(prompts, max_tokens=8)
        keys = [
            engine.submit(prompt, max_tokens=8, logprobs=count) for prompt, count in zip(prompts, counts, strict=True)
        ]
        outputs = engine.wait(*keys)
    assert [output.tokens for output in outputs] == plain
    assert outputs[0].logprobs == []
    for prompt, output, count in list(zip(prompts, outputs, counts, strict=True))[1:]:
        check(tiny[1], prompt, output.tokens, output.logprobs, count)


def test_no_logprobs_computed_unless_requested(tiny, prompts, monkeypatch):
    with running(tiny_assembly(tiny[0])) as engine:
        monkeypatch.setattr(torch.Tensor, "log_softmax", None)
        assert all(engine.generate(prompts, max_tokens=4))
        (output,) = engine.wait(engine.submit(prompts[0], max_tokens=4, logprobs=1))
    assert output.error is not None  # a request with logprobs does need it


def test_no_logprobs_computed_unless_returned(tiny, monkeypatch):
    """Without return_logprobs, the sampling parameter alone has no effect."""
    service = Service(EngineConfig.from_options(TINY | {"model": str(tiny[0])}), PB_UTILS, {"model": "tiny"})
    monkeypatch.setattr(torch.Tensor, "log_softmax", None)
    try:
        for flags, fails in (({}, False), ({"return_logprobs": True}, True)):
            caller = Caller(text_input="The sea", sampling_parameters='{"logprobs": 3}', **flags)
            service.submit(caller)
            assert caller.get(timeout=WAIT) == fails
    finally:
        service.stop()


@sync_and_async
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_neither_repeats_nor_drops_logprobs(tiny, mode):
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in (17, 31, 48, 64, 90)]
    small = {"num_gpu_blocks_override": 27, "max_num_batched_tokens": 64, "swap_space": 0.01, "preemption_mode": mode}
    with running(tiny_assembly(tiny[0], **small)) as engine:
        keys = [engine.submit(prompt, max_tokens=16, logprobs=2) for prompt in prompts]
        for prompt, output in zip(prompts, engine.wait(*keys), strict=True):
            check(tiny[1], prompt, output.tokens, output.logprobs, 2)
        assert engine.history[-1].stats.preemptions > 0


def test_prefix_cache_hit_does_not_change_logprobs(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        for _ in range(2):
            (output,) = engine.wait(engine.submit(prompts[3], max_tokens=6, logprobs=3))
            check(tiny[1], prompts[3], output.tokens, output.logprobs, 3)
        assert engine.history[-1].stats.cached_tokens > 0


@pytest.mark.parametrize("drafter", ["lookup", "itself", "draft"])
def test_draft_tokens_do_not_change_logprobs(tiny, draft, prompts, drafter):
    model = {"lookup": None, "itself": str(tiny[0]), "draft": str(draft)}[drafter]
    options = {"num_speculative_tokens": 3, "speculative_model": model, "prompt_lookup_min": 1}
    all_prompts = [*prompts, REPEATING]
    with running(tiny_assembly(tiny[0], **options)) as engine:
        for sampling in (GREEDY, SAMPLED):
            keys = [engine.submit(prompt, max_tokens=16, logprobs=2, **sampling) for prompt in all_prompts]
            for prompt, output in zip(all_prompts, engine.wait(*keys), strict=True):
                check(tiny[1], prompt, output.tokens, output.logprobs, 2)
        stats = engine.history[-1].stats
    assert stats.draft_tokens > 0
    if drafter != "draft":
        assert stats.accepted_tokens > 0


def test_stop_token_among_drafts_ends_logprobs(tiny):
    options = {"num_speculative_tokens": 4, "speculative_model": str(tiny[0])}
    with running(tiny_assembly(tiny[0], **options)) as engine:
        (tokens,) = engine.generate([[5, 6, 7]], max_tokens=21)
        end = next(token for token in tokens[2:] if token not in tokens[:2])
        (output,) = engine.wait(engine.submit([5, 6, 7], max_tokens=21, stop_token_ids=[end], logprobs=1))
    check(tiny[1], [5, 6, 7], tokens[: tokens.index(end) + 1], output.logprobs, 1)


@sync_and_async
def test_every_sample_has_its_own_logprobs(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        engine.submit(prompts[2], max_tokens=8, n=2, logprobs=3, **SAMPLED)
        tokens, found, remaining = defaultdict(list), defaultdict(list), 2
        while remaining:
            for delta in engine.steps.get(timeout=WAIT).deltas:
                tokens[delta.sample] += delta.token_ids
                found[delta.sample] += delta.values.get("logprobs", ())
                remaining -= delta.last
    assert tokens[0] != tokens[1]
    for sample in range(2):
        check(tiny[1], prompts[2], tokens[sample], found[sample], 3)


@sync_and_async
def test_graph_replay_does_not_change_logprobs(tiny, prompts, monkeypatch):
    """Replays overwrite their logits, so they must be read before the next step."""
    capture = CpuCapture(monkeypatch)
    with running(tiny_assembly(tiny[0])) as engine:
        keys = [engine.submit(prompt, max_tokens=8, logprobs=2) for prompt in prompts]
        for prompt, output in zip(prompts, engine.wait(*keys), strict=True):
            check(tiny[1], prompt, output.tokens, output.logprobs, 2)
    assert capture.replays


def beam_outputs(engine, **sampling):
    """Return (tokens, log probabilities) of each output of a beam search."""
    engine.submit(sampling.pop("prompt"), **sampling)
    outputs, remaining = defaultdict(lambda: ([], [])), sampling["n"]
    while remaining:
        for delta in engine.steps.get(timeout=WAIT).deltas:
            assert not delta.error, delta.error
            outputs[delta.sample][0].extend(delta.token_ids)
            outputs[delta.sample][1].extend(delta.values.get("logprobs", ()))
            remaining -= delta.last
    return [outputs[index] for index in sorted(outputs)]


@pytest.mark.parametrize(
    "options", [{}, {"min_tokens": 4, "stop_token_ids": list(range(0, 320, 3))}], ids=["plain", "stop tokens"]
)
def test_beams_return_logprobs_of_their_tokens(tiny, prompts, options):
    with running(tiny_assembly(tiny[0])) as engine:
        for prompt in prompts:
            for count in (0, 3):
                found = beam_outputs(engine, prompt=prompt, max_tokens=10, beam_width=3, n=3, logprobs=count, **options)
                assert len(found) == 3
                for tokens, entries in found:
                    check(tiny[1], prompt, tokens, entries, count)


def test_beam_logprobs_match_transformers(tiny, prompts):
    directory, model = tiny
    model.generation_config.eos_token_id = None
    with running(tiny_assembly(directory)) as engine:
        for prompt in prompts[:3]:
            ids = torch.tensor([prompt])
            reference = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, num_beams=4, num_return_sequences=2,
                do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            expected = model.compute_transition_scores(reference.sequences, reference.scores, reference.beam_indices)
            found = beam_outputs(engine, prompt=prompt, max_tokens=10, beam_width=4, n=2, logprobs=0)
            for (tokens, entries), sequence, scores in zip(found, reference.sequences, expected, strict=True):
                assert tokens == sequence[len(prompt) :].tolist()
                assert [sampled.logprob for (sampled,) in entries] == pytest.approx(scores.tolist(), abs=1e-4)


def test_preempted_beams_keep_logprobs(tiny, prompts):
    small = {"num_gpu_blocks_override": 22, "max_num_seqs": 20, "max_num_batched_tokens": 32}
    with running(tiny_assembly(tiny[0], **small)) as engine:
        keys = [engine.submit(prompt, max_tokens=12, beam_width=4, logprobs=1) for prompt in prompts]
        for prompt, output in zip(prompts, engine.wait(*keys), strict=True):
            check(tiny[1], prompt, output.tokens, output.logprobs, 1)
        assert engine.history[-1].stats.preemptions > 0


@sync_and_async
def test_beams_with_and_without_logprobs_in_a_step(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        keys = [
            engine.submit(prompts[2], max_tokens=8, beam_width=2),
            engine.submit(prompts[1], max_tokens=8, beam_width=2, logprobs=2),
            engine.submit(prompts[0], max_tokens=8, logprobs=1),
        ]
        plain, beam, sample = engine.wait(*keys)
    assert plain.logprobs == []
    check(tiny[1], prompts[1], beam.tokens, beam.logprobs, 2)
    check(tiny[1], prompts[0], sample.tokens, sample.logprobs, 1)


def entries_of(logits, sampled, counts):
    """Return the log probabilities of a token of each row."""
    tensors = logprobs.compute(logits, torch.tensor(sampled)[:, None], counts)
    return [entries for (entries,) in logprobs.read(tensors, counts, 1)]


def test_equal_logits_have_equal_ranks():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 1.0]])
    for token, rank in ((1, 1), (2, 1), (0, 3), (4, 3), (3, 5)):
        ((own, *others),) = entries_of(logits, [token], [5])
        assert (own.token, own.rank) == (token, rank)
        ranks = {entry.token: entry.rank for entry in (own, *others)}
        assert ranks == {0: 3, 1: 1, 2: 1, 3: 5, 4: 3}


def test_vocabulary_smaller_than_top_logprobs():
    (entries,) = entries_of(torch.tensor([[0.0, 1.0]]), [0], [20])
    assert [entry.token for entry in entries] == [0, 1]


def test_masked_token_has_a_finite_logprob():
    logits = torch.tensor([[0.0, float("-inf")]])
    (entries,) = entries_of(logits, [0], [2])
    assert entries[0].logprob == 0
    assert entries[1].logprob == pytest.approx(torch.finfo(torch.float32).min)


class TestEqualLogits:
    """Logits in 16 bits, many of which are equal."""

    LOGITS = (torch.randn(9, 3000, generator=torch.Generator().manual_seed(2)) * 2).bfloat16()

    def entries(self, rows, count):
        return entries_of(self.LOGITS[rows], [300 * row for row in rows], [count] * len(rows))

    def test_top_tokens_are_in_the_order_of_their_ids(self):
        for row, (_, *top) in enumerate(self.entries(range(9), 20)):
            logits = self.LOGITS[row].tolist()
            best = sorted(range(3000), key=lambda token: (-logits[token], token))[:20]
            assert [entry.token for entry in top] == [token for token in best if token != 300 * row]
        assert len({entry.rank for entry in top}) < 20

    def test_fewer_top_tokens_are_the_first_of_more(self):
        for chosen, *top in self.entries(range(9), 20):
            many = (chosen, *top)
            for count in range(20):
                assert LOGPROBS.narrowed(many, count) == self.entries([chosen.token // 300], count)[0]

    def test_rows_do_not_depend_on_each_other(self):
        alone = [self.entries([row], 3)[0] for row in range(9)]
        assert self.entries(range(9), 3) == alone
        assert self.entries([8, 0, 4], 3) == [alone[8], alone[0], alone[4]]

    def test_zeros_of_both_signs_are_equal(self):
        logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0]])
        (entries,) = entries_of(logits, [2], [3])
        assert [(entry.token, entry.rank) for entry in entries] == [(2, 4), (0, 1), (1, 1), (3, 1)]

    def test_padding_of_an_odd_vocabulary_is_no_token(self):
        """Not even if all tokens are returned."""
        logits = self.LOGITS[:, :19].float()
        tokens, log_probs, _ = logprobs.compute(logits, torch.arange(9)[:, None], (19,) * 9)
        torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(-1, tokens))
        assert tokens.max() == 18
