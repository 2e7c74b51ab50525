"""Decode steps that are recorded and replayed, with a recorder that runs the step again in place of a GPU's."""

import gc
import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from paged_kernels import cascade
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine import engine as engine_module
from paged_backend.engine import warm_up
from paged_backend.execution import drafter, graphs, runner
from paged_backend.execution.batch import UniformBatch, pack
from paged_backend.scheduling.plan import Chunk, Plan
from paged_backend.scheduling.sequence import Group
from tests.support.in_process import WAIT, running, tiny_assembly

SAMPLING = {"max_tokens": 12}


class Rerun:
    """Like a CUDA graph, as far as anybody can see: what it reads stays where it was, what it gives too."""

    def __init__(self):
        self.replays = []

    def __call__(self, step):
        logits = step().clone()

        def replay():
            self.replays.append(len(logits))
            return logits.copy_(step())

        return replay


@pytest.fixture
def graph_capture(monkeypatch):
    made = Rerun()
    monkeypatch.setattr(warm_up, "graph_capture", lambda device: made)
    return made


@pytest.fixture(scope="module")
def prompts():
    return [[3 + 7 * key, 5, 11 + key, 2][: 1 + key % 4] for key in range(11)]


@pytest.fixture(scope="module")
def plain(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        return engine.generate(prompts, **SAMPLING)


@pytest.mark.usefixtures("planning")
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_replayed_steps_give_the_same_tokens_as_eager(tiny, prompts, plain, graph_capture, max_num_seqs):
    with running(tiny_assembly(tiny[0], max_num_seqs=max_num_seqs)) as engine:
        assert engine.generate(prompts, **SAMPLING) == plain
    assert set(graph_capture.replays) <= set(graphs.capture_batch_sizes(max_num_seqs))
    assert graph_capture.replays


@pytest.mark.usefixtures("planning")
def test_samples_penalties_and_beams_with_replay(tiny, prompts, graph_capture, monkeypatch):
    requests = [
        {"n": 3, "temperature": 1.0, "seed": 4},
        {"temperature": 1.0, "top_p": 0.9, "seed": 5},
        {"repetition_penalty": 1.4, "presence_penalty": 0.4},
        {"beam_width": 2},
        {"min_tokens": 5, "stop_token_ids": list(range(3, 160)), "ignore_eos": False},
    ]

    def outputs():
        with running(tiny_assembly(tiny[0])) as engine:
            found = []
            for options in requests:
                engine.submit([9, 8, 7], **SAMPLING, **options)
                left = options.get("n", 1)
                while left:
                    for delta in engine.steps.get(timeout=WAIT).deltas:
                        found += [(delta.key, delta.sample, token) for token in delta.token_ids]
                        left -= delta.last
            return sorted(found, key=lambda one: one[:2])

    replayed = outputs()
    assert graph_capture.replays
    monkeypatch.setattr(warm_up, "graph_capture", lambda device: None)
    assert replayed == outputs()


@pytest.mark.parametrize("prompt", [300, 200])
def test_draft_of_one_sequence_keeps_shared_prefix_of_the_others(prompt, monkeypatch):
    """Rows beside those that guess get more rows only where they do not share: that is for single rows alone."""
    monkeypatch.setattr(cascade, "MIN_SAVED_TOKENS", 256)
    chunks = []
    for key, guesses in enumerate([(1, 2, 3), (), (), ()]):
        sampling = SamplingParams(max_tokens=9)
        sequence = Group.of(GenerateRequest(key, (5,) * prompt, sampling, 0, frozenset())).leader
        sequence.blocks = [*range(18), 20 + key]
        sequence.tokens.extend(guesses)
        chunks.append(Chunk(sequence, prompt - 1, 1 + len(guesses), (sequence,), (), guesses))
    packed = pack(Plan(tuple(chunks)), block_size=16, group=4, uniform=UniformBatch(queries=4, seqs=8))
    if prompt > cascade.MIN_SHARED_TOKENS:
        assert packed.paging.shared.lens.tolist() == [0, 288, 288, 288]
        assert packed.paging.query_starts.tolist() == [0, 4, 5, 6, 7]
    else:
        assert packed.paging.shared is None
        assert packed.paging.query_starts.tolist() == [0, 4, 8, 12, 16]


def test_padding_rows_write_nothing(tiny, graph_capture):
    """A step of 5 rows is padded to 8: every slot of the pool that no sequence holds stays as it was."""
    assembly = tiny_assembly(tiny[0], enable_prefix_caching=False)
    keys = assembly.runner.kv.layers[0].keys
    with running(assembly) as engine:
        engine.generate([[5, 6, 7]] * 5, max_tokens=6)
    assert 8 in graph_capture.replays
    written = {block for block in range(len(keys)) if keys[block].any()}
    assert len(written) == 5 * 2  # 3 tokens of the prompt and 5 of the output, in blocks of 4


@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize("recorded", [True, False])
def test_shared_prefixes_are_passed_to_attention(tiny, graph_capture, monkeypatch, recorded, guesses):
    """What attention is told of shared prefixes is true in every step, replayed or not, and changes no token."""
    prefix = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    prompts = [[*prefix, 20 + key] for key in range(5)] + [[99, 98, 97]]
    options = {"max_tokens": 8}
    with running(tiny_assembly(tiny[0], enforce_eager=True)) as engine:
        engine.generate(prompts[:1], **options)
        expected = engine.generate(prompts, **options)
    monkeypatch.setattr(runner, "_group", lambda model, device: 2)
    monkeypatch.setattr(cascade, "MIN_SHARED_TOKENS", 8)
    monkeypatch.setattr(cascade, "MIN_SAVED_TOKENS", 8)
    monkeypatch.setattr(graphs, "FEW_ROWS", 4)
    forward, told = runner.Runner._forward, []

    def spied(self, batch):
        paging, shared = batch.paging, batch.paging.shared
        if shared and shared.lens.any():
            lens, starts = shared.lens.tolist(), shared.group_starts.tolist()
            told.append((sorted(lens)[-5:], len(lens)))
            for start, end in itertools.pairwise(starts):
                rows = shared.members[start:end].tolist()
                assert len({lens[row] for row in rows}) <= 1
                assert len({tuple(paging.block_tables[row, : lens[row] // 4].tolist()) for row in rows}) <= 1
                assert all(0 < lens[row] < paging.context_lens[row] for row in rows)
            assert shared.max_len >= max(lens)
            assert sum(length > 0 for length in lens) == starts[-1]
        return forward(self, batch)

    monkeypatch.setattr(runner.Runner, "_forward", spied)
    looked_up = {"num_speculative_tokens": guesses, "prompt_lookup_min": 1}
    with running(tiny_assembly(tiny[0], enforce_eager=not recorded, **looked_up)) as engine:
        engine.generate(prompts[:1], **options)
        assert engine.generate(prompts, **options) == expected
    assert [8, 8, 8, 8, 8] in [lens for lens, _ in told]
    assert any(seqs == 32 for _, seqs in told) == (recorded and guesses > 0)
    assert bool(graph_capture.replays) == recorded


class Reads(TorchDispatchMode):
    """Memory that operations read and that none of them made."""

    def __init__(self):
        super().__init__()
        self.found, self.kept, self.made = [], [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for one in _tensors((args, kwargs)):
            memory = StorageWeakRef(one.untyped_storage())
            if memory.cdata not in self.made:
                self.found.append(memory)
        result = function(*args, **(kwargs or {}))
        made = _tensors(result)
        self.kept += made  # so that no other gets their address
        self.made |= {StorageWeakRef(one.untyped_storage()).cdata for one in made}
        return result


def _tensors(tree):
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def test_graph_inputs_outlive_the_capture(tiny, monkeypatch):
    """A CUDA graph keeps no tensor alive that was there before it."""
    reads = []

    def record(step):
        with Reads() as mode:
            logits = step()
        reads.extend(mode.found)
        return lambda: logits

    monkeypatch.setattr(warm_up, "graph_capture", lambda device: record)
    assembly = tiny_assembly(tiny[0])
    gc.collect()
    assert len(reads) > 100
    assert not [memory for memory in reads if memory.expired()]
    assert assembly.runner


def test_model_that_cannot_be_captured_runs_eagerly(tiny, prompts, plain, monkeypatch, caplog):
    def fail(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(warm_up, "graph_capture", lambda device: fail)
    with caplog.at_level(logging.WARNING), running(tiny_assembly(tiny[0])) as engine:
        assert engine.generate(prompts, **SAMPLING) == plain
    assert "decode steps are not recorded, and take longer: RuntimeError: operation not permitted" in caplog.text


def test_enforce_eager_captures_nothing(tiny, graph_capture):
    with running(tiny_assembly(tiny[0], enforce_eager=True)) as engine:
        engine.generate([[5, 6, 7]], **SAMPLING)
    assert not graph_capture.replays


REPEATING = [11, 12, 13, 14, 15, 16, 17] * 3
SAMPLINGS = [{}, {"temperature": 0.8, "seed": 7}]


def arriving(engine, prompts):
    """Outputs of requests of several kinds, some of which arrive while others run, and some end early."""
    options = [*SAMPLINGS, {"n": 2, "temperature": 0.9, "seed": 1}, {"presence_penalty": 0.3}, {"max_tokens": 3}]
    asked = [(prompt, option) for option in options for prompt in prompts]
    outputs, left, turns = {}, 0, 0
    while left or asked:
        for prompt, option in asked[: 10 if turns == 0 else turns % 3 == 0]:
            engine.submit(prompt, **{"max_tokens": 14} | option)
            left += option.get("n", 1)
            asked = asked[1:]
        turns += 1
        for delta in engine.steps.get(timeout=WAIT).deltas if left else ():
            assert delta.error is None
            outputs.setdefault((delta.key, delta.sample), []).extend(delta.token_ids)
            left -= delta.last
    return outputs


@pytest.fixture(scope="module")
def longer(prompts):
    return [prompts[3], REPEATING, [9, *REPEATING[:8]], [40, 41, 42, 43, 44, 45], REPEATING[:11]]


@pytest.fixture(scope="module")
def unguessed(tiny, longer):
    with running(tiny_assembly(tiny[0])) as engine:
        return arriving(engine, longer)


@pytest.fixture
def checked(monkeypatch):
    """That every step's forward passes, recorded or not, write where the step's own tokens belong and nowhere else, and
    that every row of padding is a sequence's. Gives the sizes of the steps so far, in rows and sequences."""
    pack, forward, guess = engine_module.pack, runner.Runner._forward, drafter.Drafter.forward
    own, seen = set(), []

    def spied_pack(plan, *, block_size, **options):
        own.clear()
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                own.add(chunk.sequence.blocks[position // block_size] * block_size + position % block_size)
        return pack(plan, block_size=block_size, **options)

    def addresses(paging):
        starts = paging.query_starts.tolist()
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        assert starts[0] == 0 and starts[-1] == len(paging.slots)
        assert all(0 <= length <= paging.max_query_len for length in lengths)
        for start, length, context in zip(starts, lengths, paging.context_lens.tolist(), strict=False):
            assert context == 0 or length <= context
            if context == 0:
                assert (paging.slots[start : start + length] == -1).all()
        return {slot for slot in paging.slots.tolist() if slot >= 0}

    def spied(self, batch):
        written = addresses(batch.paging)
        if written and own:  # neither while the model is loaded
            assert written == own
            seen.append((len(batch.paging.slots), batch.paging.num_seqs))
        return forward(self, batch)

    def spied_guess(self, batch):
        assert addresses(batch.paging) <= own or not own
        return guess(self, batch)

    monkeypatch.setattr(engine_module, "pack", spied_pack)
    monkeypatch.setattr(runner.Runner, "_forward", spied)
    monkeypatch.setattr(drafter.Drafter, "forward", spied_guess)
    return seen


@pytest.mark.parametrize("guesser", ["lookup", "itself", "draft"])
@pytest.mark.parametrize(("few_rows", "blocks"), [(192, 64), (10, 22)])  # the second pool runs dry
def test_replayed_verification_of_drafts_gives_the_same_tokens(
    tiny, draft, longer, unguessed, graph_capture, checked, monkeypatch, guesser, few_rows, blocks
):
    monkeypatch.setattr(graphs, "FEW_ROWS", few_rows)
    model = {"lookup": None, "itself": str(tiny[0]), "draft": str(draft)}[guesser]
    options = {"num_speculative_tokens": 4, "speculative_model": model, "prompt_lookup_min": 1}
    with running(tiny_assembly(tiny[0], num_gpu_blocks_override=blocks, **options)) as engine:
        assert arriving(engine, longer) == unguessed
        stats = engine.assembly.scheduler.stats
    assert stats.draft_tokens and bool(stats.preemptions) == (blocks < 64)
    if guesser == "itself":
        assert stats.accepted_tokens == stats.draft_tokens
    assert any(rows == 5 * seqs > 10 for rows, seqs in checked) == (few_rows == 192)
    assert (32, 32) in checked or few_rows == 192  # what is more than two sequences


def test_replayed_shapes_with_a_draft_model(tiny, graph_capture):
    """All but the prompt: a token of the model that guesses four times, then a check of five rows; and at the end a
    decode step, for which there is nothing left to guess."""
    with running(tiny_assembly(tiny[0], num_speculative_tokens=4, speculative_model=str(tiny[0]))) as engine:
        engine.generate([[5, 6, 7, 8, 9, 10]], max_tokens=12)
    assert graph_capture.replays == [*[1, 1, 1, 1, 5] * 2, 1]


def test_sequence_shorter_than_a_verification_is_not_widened(tiny, graph_capture, checked):
    """There is nothing to fill five rows with: of the 32 that are recorded, those beside its own are padding."""
    with running(tiny_assembly(tiny[0], num_speculative_tokens=4, speculative_model=str(tiny[0]))) as engine:
        engine.generate([[5]], max_tokens=4)
    assert graph_capture.replays == [1, 1, 1, 32]  # the prompt, two guesses, and three rows
    assert checked == [(1, 1), (32, 32)]


def test_draft_model_also_runs_steps_without_drafts(tiny, graph_capture):
    """A replay without its keys and values of these tokens would make its later guesses wrong."""
    with running(tiny_assembly(tiny[0], num_speculative_tokens=3, speculative_model=str(tiny[0]))) as engine:
        (tokens,) = engine.generate([[5, 6, 7]], max_tokens=18, presence_penalty=0.1)  # under a penalty nothing is
        assert graph_capture.replays == [32, *[1] * 17]
        engine.generate([[5, 6, 7, *tokens]], max_tokens=17)
        stats = engine.assembly.scheduler.stats
    assert stats.draft_tokens and stats.accepted_tokens == stats.draft_tokens


@pytest.mark.parametrize("queries", [1, 2, 5, 33])
@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 64), (8, 16), (64, 512), (512, 4096)])
def test_graph_shapes_cover_every_step_up_to_their_bounds(max_num_seqs, budget, queries):
    """In the order that their memory wants, and each with as many sequences of padding as rows of padding need."""
    graph_shapes = graphs.graph_shapes(max_num_seqs, budget, queries=queries)
    assert [kind.rows for kind in graph_shapes] == sorted((kind.rows for kind in graph_shapes), reverse=True)
    assert len(set(graph_shapes)) == len(graph_shapes)
    held = SimpleNamespace(shared=None)
    for held.num_seqs in range(1, max_num_seqs + 1):
        for held.max_query_len in {1, queries}:
            rows = range(held.num_seqs, held.num_seqs * held.max_query_len + 1)
            for held.slots in map(range, rows[:: max(1, len(rows) // 7)]):
                if len(held.slots) <= min(budget, graphs.MOST_ROWS):
                    assert any(kind.fits(held) for kind in graph_shapes), held


@pytest.mark.parametrize("most", [1, 2, 5, 8, 64, 100, 256, 1000])
def test_batch_sizes_end_with_the_largest_and_limit_padding(most):
    capture_batch_sizes = graphs.capture_batch_sizes(most)
    assert capture_batch_sizes == sorted(set(capture_batch_sizes))
    assert capture_batch_sizes[-1] == min(most, 512)
    for count in range(1, capture_batch_sizes[-1] + 1):
        size = next(size for size in capture_batch_sizes if size >= count)
        assert size - count < max(8, count / 8 if count > 8 else 4)


def test_cpu_has_no_graph_capture():
    assert graphs.graph_capture(torch.device("cpu")) is None
