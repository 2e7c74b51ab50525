"""Captured and replayed steps, with recorded operations in place of CUDA graphs."""

import gc
import itertools
import json
import logging
import os
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paged_backend.engine import core, runner_builder
from paged_backend.execution import graphs, runner
from paged_backend.models import few_rows, latent_attention
from paged_kernels import paging
from paged_kernels.launch import zeros
from tests.support.families import FAMILIES
from tests.support.in_process import WAIT, running, save_tiny, tiny_assembly
from tests.support.pairwise import mostly_nightly
from tests.support.recorded_graphs import CpuCapture

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = {"max_tokens": 12}


@pytest.fixture
def capture(monkeypatch):
    return CpuCapture(monkeypatch)


@pytest.fixture(scope="module")
def prompts():
    return [[3 + 7 * key, 5, 11 + key, 2][: 1 + key % 4] for key in range(11)]


@pytest.fixture(scope="module")
def plain(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        return engine.generate(prompts, **SAMPLING)


@pytest.mark.usefixtures("async_scheduling")
@pytest.mark.parametrize("max_num_seqs", mostly_nightly([1, 3, 8, 12], default=[3, 12]))
def test_replayed_steps_give_the_same_tokens_as_eager(tiny, prompts, plain, capture, max_num_seqs):
    """With 12 sequences, the largest graph does not have the most logits."""
    with running(tiny_assembly(tiny[0], max_num_seqs=max_num_seqs)) as engine:
        assert engine.generate(prompts, **SAMPLING) == plain
    shapes = graphs.graph_shapes(max_num_seqs, 16)
    assert (shapes[0].logits < max_num_seqs) == (max_num_seqs == 12)
    assert set(capture.replays) <= {shape.logits for shape in shapes}
    assert capture.replays


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """The directory of a model with two kinds of layers, whose blocks have several pages."""
    directory = tmp_path_factory.mktemp("windowed")
    save_tiny(FAMILIES["gemma3"](), directory)
    return directory


@pytest.mark.parametrize(
    "options",
    mostly_nightly(
        [{}, {"async_scheduling": True}, {"num_speculative_tokens": 3}],
        default=[{"async_scheduling": True}, {"num_speculative_tokens": 3}],
    ),
    ids=str,
)
def test_replayed_steps_of_a_model_with_sliding_windows(windowed, prompts, capture, monkeypatch, options):
    """Outputs are longer than the window, so that blocks leave it."""
    prompts = [prompt * 3 for prompt in prompts]
    with running(tiny_assembly(windowed, **options)) as engine:
        replayed = engine.generate(prompts, max_tokens=20)
        assert engine.assembly.scheduler.blocks.layout.pages == 3
    assert capture.replays
    monkeypatch.setattr(runner_builder, "graph_capture", lambda device: None)
    with running(tiny_assembly(windowed, **options)) as engine:
        assert replayed == engine.generate(prompts, max_tokens=20)


@pytest.mark.usefixtures("async_scheduling")
def test_samples_penalties_and_beams_with_replay(tiny, prompts, capture, monkeypatch):
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
    assert capture.replays
    monkeypatch.setattr(runner_builder, "graph_capture", lambda device: None)
    assert replayed == outputs()


@pytest.mark.usefixtures("capture")
def test_graphs_share_the_logits_of_the_one_with_the_most():
    """Of those captured before, since the largest graph need not have the most."""
    capture_step = graphs.CudaGraphCapture()
    replays = [capture_step(lambda count=count: torch.ones(count, 2) * count) for count in (3, 2, 5, 5, 3)]
    found = [replay() for replay in replays]
    assert [len(logits) for logits in found] == [3, 2, 5, 5, 3]
    memory = [logits.data_ptr() for logits in found]
    assert memory[0] == memory[1] != memory[2] == memory[3] == memory[4]


def test_padding_rows_write_nothing(tiny, capture):
    """A step of 5 rows is padded to 8. Slots of the pool that no sequence holds do not change."""
    assembly = tiny_assembly(tiny[0], enable_prefix_caching=False)
    keys = assembly.runner.kv.layers[0].keys
    with running(assembly) as engine:
        engine.generate([[5, 6, 7]] * 5, max_tokens=6)
    assert 8 in capture.replays
    written = {block for block in range(len(keys)) if keys[block].any()}
    assert len(written) == 5 * 2  # 3 tokens of the prompt and 5 of the output, in blocks of 4


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("captured", [True, False])
def test_shared_prefixes_are_passed_to_attention(tiny, capture, monkeypatch, captured, drafts):
    """The shared prefixes that attention is given are correct in every step, replayed or not, and change no token."""
    prefix = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    prompts = [[*prefix, 20 + key] for key in range(5)] + [[99, 98, 97]]
    options = {"max_tokens": 8}
    with running(tiny_assembly(tiny[0], enforce_eager=True)) as engine:
        engine.generate(prompts[:1], **options)
        expected = engine.generate(prompts, **options)
    monkeypatch.setattr(runner, "_gqa_group", lambda *args, **rest: 2)
    monkeypatch.setattr(paging, "MIN_SHARED_TOKENS", 8)
    monkeypatch.setattr(paging, "MIN_SAVED_TOKENS", 8)
    monkeypatch.setattr(graphs, "MEMORY_BOUND_ROWS", 4)
    forward, seen = runner.Runner._forward, []

    def check(paging):
        shared = paging.shared
        if shared and shared.lens.any():
            lens, starts = shared.lens.tolist(), shared.group_starts.tolist()
            seen.append((sorted(lens)[-5:], len(lens)))
            for start, end in itertools.pairwise(starts):
                rows = shared.members[start:end].tolist()
                assert len({lens[row] for row in rows}) <= 1
                assert len({tuple(paging.block_tables[row, : lens[row] // 4].tolist()) for row in rows}) <= 1
                assert all(0 < lens[row] < paging.context_lens[row] for row in rows)
            assert shared.max_len >= max(lens)
            assert sum(length > 0 for length in lens) == starts[-1]

    def spied(self, batch):
        capture.check(check, batch.paging)
        return forward(self, batch)

    monkeypatch.setattr(runner.Runner, "_forward", spied)
    drafting = {"num_speculative_tokens": drafts, "prompt_lookup_min": 1}
    with running(tiny_assembly(tiny[0], enforce_eager=not captured, **drafting)) as engine:
        engine.generate(prompts[:1], **options)
        assert engine.generate(prompts, **options) == expected
    assert [8, 8, 8, 8, 8] in [lens for lens, _ in seen]
    assert any(seqs == 32 for _, seqs in seen) == (captured and drafts > 0)
    assert bool(capture.replays) == captured


class ExternalReads(TorchDispatchMode):
    """Collects the memory that operations read and that none of them allocated."""

    def __init__(self):
        super().__init__()
        self.found, self.kept, self.made = [], [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in _tensors((args, kwargs)):
            memory = StorageWeakRef(tensor.untyped_storage())
            if memory.cdata not in self.made:
                self.found.append(memory)
        result = function(*args, **(kwargs or {}))
        made = _tensors(result)
        self.kept += made  # so that their addresses are not reused
        self.made |= {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in made}
        return result


def _tensors(tree):
    return [tensor for tensor in tree_leaves(tree) if isinstance(tensor, torch.Tensor)]


def test_graph_inputs_outlive_the_capture(tiny, monkeypatch):
    """A CUDA graph does not keep alive the tensors that it reads."""
    reads = []

    def capture(step):
        with ExternalReads() as mode:
            logits = step()
        reads.extend(mode.found)
        return lambda: logits

    def sample(logits, metadata, out):  # on a CPU sampling allocates memory with NumPy, which is not tracked
        read = (metadata.scales, metadata.seeds, metadata.positions, *vars(metadata.filters).values())
        return out.copy_(logits.argmax(-1) + sum(tensor.long() for tensor in read))

    monkeypatch.setattr(graphs, "sample", sample)
    monkeypatch.setattr(runner_builder, "graph_capture", lambda device: capture)
    assembly = tiny_assembly(tiny[0])
    gc.collect()
    assert len(reads) > 100
    assert not [memory for memory in reads if memory.expired()]
    assert assembly.runner


def test_model_that_cannot_be_captured_runs_eagerly(tiny, prompts, plain, monkeypatch, caplog):
    def fail(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(runner_builder, "graph_capture", lambda device: fail)
    with caplog.at_level(logging.WARNING), running(tiny_assembly(tiny[0])) as engine:
        assert engine.generate(prompts, **SAMPLING) == plain
    assert "no CUDA graphs, so decode steps take longer: RuntimeError: operation not permitted" in caplog.text


def test_enforce_eager_captures_nothing(tiny, capture):
    with running(tiny_assembly(tiny[0], enforce_eager=True)) as engine:
        engine.generate([[5, 6, 7]], **SAMPLING)
    assert not capture.replays


REPEATING = [11, 12, 13, 14, 15, 16, 17] * 3
SAMPLINGS = [{}, {"temperature": 0.8, "seed": 7}]


def arriving(engine, prompts):
    """Return the outputs of requests of several kinds. Some arrive while others run, and some end early."""
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
def undrafted(tiny, longer):
    with running(tiny_assembly(tiny[0])) as engine:
        return arriving(engine, longer)


@pytest.fixture
def checked(capture, monkeypatch):
    """Check that the forward passes of every step, replayed or not, write the slots of the step's own tokens and no
    others, and that every padding row belongs to a sequence. Returns the sizes of the steps so far, in rows and
    sequences."""
    pack, forward, draft_forward = core.pack, runner.Runner._forward, runner.Drafter.forward
    own, seen = set(), []

    def spied_pack(plan, *, block_size, **options):
        own.clear()
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                own.add(chunk.sequence.tables[0][position // block_size] * block_size + position % block_size)
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

    def check(paging):
        written = addresses(paging)
        if written and own:  # both are empty while the model is loaded
            assert written == own
            seen.append((len(paging.slots), paging.num_seqs))

    def check_draft(paging):
        assert addresses(paging) <= own or not own

    def spied(self, batch):
        capture.check(check, batch.paging)
        return forward(self, batch)

    def spied_draft(self, batch):
        capture.check(check_draft, batch.paging)
        return draft_forward(self, batch)

    monkeypatch.setattr(core, "pack", spied_pack)
    monkeypatch.setattr(runner.Runner, "_forward", spied)
    monkeypatch.setattr(runner.Drafter, "forward", spied_draft)
    return seen


PROPOSERS = ("lookup", "itself", "draft")
SIZES = ((192, 64), (10, 22))  # memory-bound rows, blocks; the second pool is exhausted


@pytest.mark.parametrize(
    ("proposer", "sizes"),
    mostly_nightly(itertools.product(PROPOSERS, SIZES), default=zip(PROPOSERS, (*SIZES, SIZES[1]), strict=True)),
)
def test_replayed_verification_of_drafts_gives_the_same_tokens(
    tiny, draft, longer, undrafted, capture, checked, monkeypatch, proposer, sizes
):
    memory_bound_rows, blocks = sizes
    monkeypatch.setattr(graphs, "MEMORY_BOUND_ROWS", memory_bound_rows)
    model = {"lookup": None, "itself": str(tiny[0]), "draft": str(draft)}[proposer]
    options = {"num_speculative_tokens": 4, "speculative_model": model, "prompt_lookup_min": 1}
    with running(tiny_assembly(tiny[0], num_gpu_blocks_override=blocks, **options)) as engine:
        assert arriving(engine, longer) == undrafted
        stats = engine.assembly.scheduler.stats
    assert stats.draft_tokens and bool(stats.preemptions) == (blocks < 64)
    if proposer == "itself":
        assert stats.accepted_tokens == stats.draft_tokens
    assert any(rows == 5 * seqs > 10 for rows, seqs in checked) == (memory_bound_rows == 192)
    assert (32, 32) in checked or memory_bound_rows == 192  # steps of more than two sequences


def test_replayed_shapes_with_a_draft_model(tiny, capture):
    """The prompt, then four tokens of the draft model and a verification of five rows; at the end a decode step, for
    which no token is left to draft."""
    with running(tiny_assembly(tiny[0], num_speculative_tokens=4, speculative_model=str(tiny[0]))) as engine:
        engine.generate([[5, 6, 7, 8, 9, 10]], max_tokens=12)
    assert capture.replays == [5, *[1, 1, 1, 1, 5] * 2, 1]


def test_sequence_shorter_than_a_verification_is_not_widened(tiny, capture, checked):
    """It has no five rows to pad to, so a captured step with padding sequences is used, which has 16 rows."""
    with running(tiny_assembly(tiny[0], num_speculative_tokens=4, speculative_model=str(tiny[0]))) as engine:
        engine.generate([[5]], max_tokens=4)
    assert capture.replays == [1, 1, 1, 5]  # the prompt, two draft tokens, and three rows
    assert checked == [(1, 1), (16, 5)]


def test_draft_model_also_runs_steps_without_drafts(tiny, capture):
    """A replay that left out the draft model's keys and values would make its later draft tokens wrong."""
    with running(tiny_assembly(tiny[0], num_speculative_tokens=3, speculative_model=str(tiny[0]))) as engine:
        (tokens,) = engine.generate([[5, 6, 7]], max_tokens=18, presence_penalty=0.1)  # which disables drafting
        assert capture.replays == [5, *[1] * 17]
        engine.generate([[5, 6, 7, *tokens]], max_tokens=17)
        stats = engine.assembly.scheduler.stats
    assert stats.draft_tokens and stats.accepted_tokens == stats.draft_tokens


# --- prompts

ROOMY = {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 256, "enable_prefix_caching": False}
PROMPT_LOGITS = 9  # logits of a captured step with chunks of prompts: eight sequences, and one that is padding


def tokens_of(length, first=5):
    return [3 + (first * position * position + position) % 250 for position in range(length)]


def steps_of(engine):
    """Return the sequences and tokens of each step so far, and whether it was replayed."""
    return [(one.report.num_seqs, one.report.num_tokens, one.report.replayed) for one in engine.history if one.report]


CAPTURED = {2: 64, 64: 64, 65: 128, 128: 128, 200: 256, 240: 256}  # rows of the step that holds a prompt, by its length
ARRIVING = [*(tokens_of(7, first=key) for key in (2, 3, 4)), tokens_of(150), tokens_of(90, first=7)]


@pytest.fixture(scope="module")
def eager(tiny):
    """An engine without graphs."""
    with running(tiny_assembly(tiny[0], enforce_eager=True, **ROOMY)) as engine:
        yield engine


@pytest.fixture(scope="module")
def arrived(eager):
    return eager.generate(ARRIVING, max_tokens=12)


@pytest.fixture(scope="module")
def alone(eager):
    """Prompts with their tokens."""
    prompts = [tokens_of(length, first=length) for length in CAPTURED]
    return [(prompt, eager.generate([prompt], max_tokens=4)) for prompt in prompts]


@pytest.mark.usefixtures("async_scheduling")
def test_a_lone_prompt_is_replayed(tiny, alone, capture, checked):
    """In the smallest step that holds it. Padding does not change its tokens."""
    with running(tiny_assembly(tiny[0], **ROOMY | {"max_num_batched_tokens": 256})) as engine:
        for prompt, tokens in alone:
            assert engine.generate([prompt], max_tokens=4) == tokens
        assert all(replayed for _, _, replayed in steps_of(engine))
    assert [step for step in checked if step[0] > 8] == [(rows, PROMPT_LOGITS) for rows in CAPTURED.values()]


@pytest.mark.usefixtures("async_scheduling")
def test_chunks_of_a_prompt_are_replayed_with_the_decode_rows_beside_them(tiny, arrived, capture, checked):
    """A chunk that ends before its prompt samples nothing."""
    with running(tiny_assembly(tiny[0], **ROOMY | {"max_num_batched_tokens": 64}), lead=1) as engine:
        keys = [engine.submit(prompt, max_tokens=12) for prompt in ARRIVING[:3]]
        while not all(engine.outputs[key].tokens for key in keys):
            engine.step()
        keys += [engine.submit(prompt, max_tokens=12) for prompt in ARRIVING[3:]]
        assert [output.tokens for output in engine.wait(*keys)] == arrived
        steps = steps_of(engine)
    assert all(replayed for _, _, replayed in steps)
    assert sum(seqs > 1 and tokens == 64 for seqs, tokens, _ in steps) >= 3
    assert (64, PROMPT_LOGITS) in checked


def test_first_tokens_are_sampled_from_the_logits_of_a_replay(tiny, eager, capture):
    prompts = [tokens_of(70), tokens_of(40, first=8)]

    def outputs(engine):
        found = []
        for options in (
            {"presence_penalty": 1.5, "repetition_penalty": 1.3},
            {"allowed_token_ids": [5, 7, 11]},
            {"temperature": 1.0, "top_p": 0.9, "seed": 3},
            {"beam_width": 2},
            {"logprobs": 2},
        ):
            found += engine.wait(*[engine.submit(prompt, max_tokens=3, **options) for prompt in prompts])
        return found

    with running(tiny_assembly(tiny[0], **ROOMY)) as engine:
        found = outputs(engine)
        assert all(replayed for _, _, replayed in steps_of(engine))
    assert PROMPT_LOGITS in capture.replays
    for one, other in zip(found, outputs(eager), strict=True):
        assert one.tokens == other.tokens
        assert logprobs_of(one.logprobs) == pytest.approx(logprobs_of(other.logprobs), abs=1e-3)


def logprobs_of(values):
    return {(at, entry.token): entry.logprob for at, of_token in enumerate(values) for entry in of_token}


def test_a_prompt_with_more_logits_than_sequences_runs_eagerly(tiny, eager, capture):
    """As for its log probabilities. With few tokens it is replayed, and its first token is sampled afterwards."""
    with running(tiny_assembly(tiny[0], **ROOMY)) as engine:
        for prompt in (tokens_of(8), tokens_of(100)):
            of_both = [one.wait(one.submit(prompt, max_tokens=3, prompt_logprobs=2))[0] for one in (engine, eager)]
            assert of_both[0].tokens == of_both[1].tokens
            found, expected = (logprobs_of(output.prompt_logprobs) for output in of_both)
            assert len(found) >= 2 * (len(prompt) - 1)
            assert found == pytest.approx(expected, abs=1e-3)
        assert [replayed for _, _, replayed in steps_of(engine)] == [True, True, True, False, True, True]


def test_prompts_that_cannot_be_captured_leave_the_graphs_of_decode_steps(tiny, eager, capture, monkeypatch, caplog):
    forward, prompt = runner.Runner._forward, tokens_of(100)

    def reading(self, batch):
        logits = forward(self, batch)
        if batch.paging.max_query_len > 1:
            logits[0, 0].item()
        return logits

    monkeypatch.setattr(runner.Runner, "_forward", reading)
    expected = eager.generate([prompt], max_tokens=4)
    with caplog.at_level(logging.WARNING), running(tiny_assembly(tiny[0], **ROOMY)) as engine:
        assert engine.generate([prompt], max_tokens=4) == expected
        assert [replayed for _, _, replayed in steps_of(engine)] == [False, True, True, True]
    assert "no CUDA graphs, so prompts take longer: RuntimeError: operation not permitted" in caplog.text
    assert "decode steps take longer" not in caplog.text


def test_chunks_over_latents_are_replayed_if_they_are_not_expanded(tmp_path, capture, monkeypatch):
    """Expanding the latents of a long chunk reads lengths on the host. The model has no experts, which do so on a
    CPU."""
    monkeypatch.setattr(latent_attention.LatentAttention, "_break_even", lambda self: 128)
    config = FAMILIES["deepseek_v3"]()
    config.first_k_dense_replace = config.num_hidden_layers
    save_tiny(config, tmp_path)
    prompts = [[tokens_of(127)], [tokens_of(128)], [tokens_of(80), tokens_of(100, first=7)]]

    def outputs(**options):
        with running(tiny_assembly(tmp_path, **ROOMY | options), lead=1) as engine:
            return [engine.generate(together, max_tokens=2) for together in prompts], steps_of(engine)

    (found, steps), (expected, _) = outputs(), outputs(enforce_eager=True)
    assert found == expected
    assert {step for step in steps if step[1] > 2} >= {(1, 127, True), (1, 128, False)}
    assert all(replayed for _, tokens, replayed in steps if tokens != 128)


# --- the operations of a step


def test_cpu_has_no_graph_capture():
    assert graphs.graph_capture(torch.device("cpu")) is None


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default"),
        pytest.param({"batch_invariant": True}, id="batch-invariant", marks=pytest.mark.nightly),
    ],
)
def test_a_step_is_one_copy_one_graph_and_one_copy_back(options):
    """A decode step or a prompt, with the kernels that a GPU runs: six launches per layer with few rows, and none
    outside of the graph. With batch_invariant there are nine for any number of rows, or ten if programs share the keys
    of a row."""
    command = [sys.executable, "-m", "tests.support.fake_decode_step", "qwen3", json.dumps(options)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    two_layers, four_layers = json.loads(done.stdout.splitlines()[-1]).values()
    for outside in two_layers["outside"]:
        assert outside == ["copy_", "clone"]  # of the inputs, and of the sampled tokens to the host
    for size, operations in two_layers["graphs"].items():
        more = Counter(four_layers["graphs"][size])
        more.subtract(operations)
        if options:
            expected = 10 if "add_partitions_kernel" in operations else 9
        else:
            expected = 6 if int(size.split()[0]) <= few_rows.ROWS[-1] else 9
        assert sum(more.values()) == 2 * expected, size
        assert len(operations) - sum(more.values()) <= 9, size


def test_counters_of_kernels_live_as_long_as_their_graph(monkeypatch):
    CpuCapture(monkeypatch)
    made = []

    def step():
        made.append(weakref.ref(zeros(8, torch.device("cpu"))))
        return torch.ones(1, 2)

    replay = graphs.CudaGraphCapture()(step)
    gc.collect()
    assert made[-1]() is not None
    del replay
    gc.collect()
    assert made[-1]() is None


# --- shapes


@pytest.mark.parametrize("queries", [1, 2, 5, 33])
@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 64), (8, 16), (64, 512), (512, 4096)])
def test_graph_shapes_cover_every_step_up_to_their_bounds(max_num_seqs, budget, queries):
    """Ordered from the largest, and each with enough padding sequences for its padding rows."""
    shapes = graphs.graph_shapes(max_num_seqs, budget, queries=queries)
    assert [shape.rows for shape in shapes] == sorted((shape.rows for shape in shapes), reverse=True)
    assert len(set(shapes)) == len(shapes)
    shapes = graphs.without_prompts(shapes)
    held = SimpleNamespace(shared=None)
    for held.num_seqs in range(1, max_num_seqs + 1):
        for held.max_query_len in {1, queries}:
            rows = range(held.num_seqs, held.num_seqs * held.max_query_len + 1)
            for held.slots in map(range, rows[:: max(1, len(rows) // 7)]):
                if len(held.slots) <= min(budget, graphs.MAX_ROWS):
                    step = SimpleNamespace(paging=held, sample_rows=held.slots)
                    assert any(shape.fits(step) for shape in shapes), held


@pytest.mark.parametrize("most", [1, 2, 5, 8, 64, 100, 256, 1000])
def test_batch_sizes_end_with_the_largest_and_limit_padding(most):
    sizes = graphs.capture_batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 512)
    for count in range(1, sizes[-1] + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count < max(8, count / 8 if count > 8 else 4)


@pytest.mark.parametrize("max_chunk", [127, 512])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (1, 64), (8, 16), (8, 100), (64, 512), (300, 4096)])
def test_graph_shapes_of_prompts(sizes, max_chunk):
    """They are limited by the options, and hold each chunk with decode rows up to a quarter of the rows."""
    max_num_seqs, budget = sizes
    shapes = graphs.graph_shapes(max_num_seqs, budget, max_chunk=max_chunk)
    prompts = [shape for shape in shapes if shape.prompts]
    assert len(prompts) == (0 if budget == 1 else -(-min(budget, 512) // 64))
    most = min(budget, 512)
    for shape in prompts:
        assert shape.rows <= most and shape.queries <= max_chunk and shape.seqs <= max_num_seqs + 1
    held = SimpleNamespace(shared=None)
    step = SimpleNamespace(paging=held)
    for held.max_query_len in range(2, 1 + min(most, max_chunk)):
        for held.num_seqs in range(1, 1 + min(max_num_seqs, 32)):
            held.slots = range(held.max_query_len + held.num_seqs - 1)
            step.sample_rows = range(held.num_seqs)
            fitting = [shape.rows for shape in prompts if shape.fits(step)]
            has_room = len(held.slots) <= most and held.num_seqs <= max(1, len(held.slots) // 4)
            assert not has_room or min(fitting) < len(held.slots) + 64
    held.slots = step.sample_rows = range(most)  # more logits than sequences
    held.num_seqs, held.max_query_len = 1, most
    assert most < 4 or not any(shape.fits(step) for shape in prompts)
