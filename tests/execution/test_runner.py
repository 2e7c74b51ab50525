"""Steps of a runner, forward passes over packed batches, and draft models."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.token_outputs import requested_outputs
from paged_backend.execution import graphs
from paged_backend.execution.batch import pack
from paged_backend.execution.runner import Drafter, Runner, paged_logits, propose
from paged_backend.execution.upload import map_tensors
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.cache import CacheLayout, KVCache, LayerShape
from paged_backend.models import rope
from paged_backend.models.attention import ATTENTION, AttentionSpec
from paged_backend.models.decoder import FusedDecoder
from paged_backend.models.fusion import fuse
from paged_backend.models.overrides import use
from paged_backend.scheduling.beam_search import Candidate
from paged_backend.scheduling.plan import StepResult
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.speculation import propose_placeholders
from paged_kernels import ops
from paged_kernels.cpu import pytorch
from tests.support.in_process import tiny_assembly

META = torch.device("meta")
SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0, "min_tokens": 3},
    {"n": 3},
    {"beam_width": 2, "min_tokens": 2},
    {"logprobs": 3, "n": 2},
]
PROMPTS = [list(range(5, 15)), [7, 8, 9]]
VOCAB = 50


# --- steps do not synchronize: on the meta device, reading a value raises


@pytest.fixture
def kernels_without_values(monkeypatch):
    """Kernels that return tensors of the right shapes without computing."""
    results = {
        "paged_attention": lambda query, *_, **__: torch.empty_like(query),
        "rope_kv_write": lambda query, *_, **__: torch.empty_like(query),
        "kv_write": lambda *_: None,
        "add_rms_norm": pytorch.add_rms_norm,
        "swiglu": pytorch.swiglu,
        "embed": pytorch.embed,
        "sample": lambda logits, _, out: torch.empty(len(logits), dtype=torch.int64, device=logits.device),
        "step_inputs": lambda tokens, *_, **__: torch.empty_like(tokens),
    }
    monkeypatch.setattr(ops, "_implementation", lambda module, function, on_cpu: results[function])


@pytest.fixture(params=[True, False], ids=["fused", "unmodified"])
def model(request):
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**shape, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation(ATTENTION)
    rope.freeze_rope(model)
    if request.param:
        decoder = fuse(model, [AttentionSpec(scale=0.3)] * 2, {})
        assert isinstance(decoder, FusedDecoder)
        use(model, {(decoder.module, "forward"): decoder})
    return model


def drawn(plan):
    """Return arbitrary results, as if they had been copied to the host."""
    beams = [Candidate(token, -float(token)) for token in range(8)]
    sequences = [sequence for chunk in plan.chunks for sequence in chunk.sampled_sequences]
    candidates = {index: beams for index, sequence in enumerate(sequences) if sequence.request.sampling.beam_width > 1}
    return StepResult([[1] for _ in sequences], candidates=candidates)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids="+".join)
@pytest.mark.usefixtures("kernels_without_values")
def test_launch_does_not_synchronize(model, sampling):
    kv = KVCache.allocate(CacheLayout.of([LayerShape(2, 8)] * 2, 4, torch.float32), 32, META)
    runner = Runner(model, kv, max_sampled=8)
    runner._upload = lambda tree, head=None: map_tensors(tree, lambda tensor: tensor.to(META))
    scheduler = Scheduler(BlockManager(32, BlockLayout(4), caching=True), max_num_seqs=8, max_num_batched_tokens=8)
    stop_ids = frozenset({5}) if "min_tokens" in sampling else frozenset()
    for key in range(2):
        params = SamplingParams(max_tokens=6, **sampling)
        request = GenerateRequest(
            key, (7, 8, 9, 10, 11, 12), params, 0, stop_ids, token_outputs=requested_outputs(["logprobs"], params)
        )
        scheduler.add(request)
    plans = []
    for _ in range(5):  # chunked prefill, then decode, each step launched before the previous result is known
        plans.append(scheduler.schedule())
        launched = runner.launch(pack(plans[-1], block_size=4))
        assert launched.tokens.device == META
        assert bool(launched.outputs) == ("logprobs" in sampling and bool(len(launched.tokens)))
        while len(plans) > (not scheduler.needs_results):
            done = plans.pop(0)
            scheduler.commit(done, drawn(done))


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.usefixtures("kernels_without_values")
def test_drafting_and_verification_do_not_synchronize(model, captured):
    kv = KVCache.allocate(CacheLayout.of([LayerShape(2, 8)] * 4, 4, torch.float32), 32, META)
    runner = Runner(model, kv, max_sampled=64, drafter=Drafter(model, kv.layer_range(2, 4)))
    runner._upload = lambda tree, head=None: map_tensors(tree, lambda tensor: tensor.to(META))
    replays = []

    def capture(step):
        logits = step()
        return lambda: replays.append(len(logits)) or logits

    if captured:
        shapes = graphs.graph_shapes(8, 64, queries=4)
        runner.capture_graphs(capture, shapes, block_size=4, max_blocks=16, max_context_len=64)
    scheduler = Scheduler(
        BlockManager(32, BlockLayout(4), caching=True),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        proposer=propose_placeholders,
        max_draft_tokens=3,
    )
    for key in range(3):
        scheduler.add(GenerateRequest(key, (7, 8, 9, 10), SamplingParams(max_tokens=6 + key), 0, frozenset()))
    for _ in range(3):
        plan = scheduler.schedule()
        launched = runner.launch(pack(plan, block_size=4, draft=True, uniform=runner.uniform))
        assert launched.tokens.device == META
        scheduler.commit(plan, StepResult([[1, *chunk.draft_tokens] for chunk in plan.chunks]))
    prompts, check, last = [16], [4, 4, 4, 16], [2, 1, 16]  # in the end 0, 1 and 2 tokens are left to draft
    assert replays == ([*prompts, *check, *last] if captured else [])


def test_reading_a_meta_value_raises():
    with pytest.raises(Exception, match="meta"):
        torch.empty(1, device=META).item()


# --- forward passes: the logits are those of the model itself


@pytest.fixture(scope="module")
def assembly(tiny):
    return tiny_assembly(tiny[0], device="cpu")


def test_logits_of_sampled_rows_match_the_model(tiny, assembly):
    """A chunk that ends inside a prompt has none."""
    scheduler, model = assembly.scheduler, assembly.loaded.model
    for key, prompt in enumerate(PROMPTS):
        scheduler.add(GenerateRequest(key, tuple(prompt), SamplingParams(max_tokens=2), 0, frozenset()))
    tokens = [[*prompt] for prompt in PROMPTS]
    for _ in range(2):  # the prompts, then one token each
        plan = scheduler.schedule()
        logits = paged_logits(model, pack(plan, block_size=4), assembly.runner.kv)
        with torch.inference_mode():
            expected = torch.stack([tiny[1](torch.tensor([one])).logits[0, -1] for one in tokens])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        sampled = [3, 4]
        scheduler.commit(plan, StepResult.of_tokens(sampled))
        for one, token in zip(tokens, sampled, strict=True):
            one.append(token)


def test_model_that_projects_every_row_gives_the_same_logits(assembly, monkeypatch):
    scheduler, model = assembly.scheduler, assembly.loaded.model
    scheduler.add(GenerateRequest(9, tuple(PROMPTS[0]), SamplingParams(max_tokens=1), 0, frozenset()))
    plan = scheduler.schedule()
    batch = pack(plan, block_size=4)
    expected = paged_logits(model, batch, assembly.runner.kv)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, logits_to_keep, **rest: forward(*args, **rest))
    torch.testing.assert_close(paged_logits(model, batch, assembly.runner.kv), expected)
    assert len(expected) == 1
    scheduler.commit(plan, StepResult.of_tokens([3]))


# --- draft models: each round proposes one token per sequence, from the tokens proposed before


def drafted_batch(max_tokens):
    """Return the first decode step of requests with so many tokens, whose last tokens are 10, 20 and so on."""
    scheduler = Scheduler(
        BlockManager(32, BlockLayout(4)), max_num_seqs=8, max_num_batched_tokens=64, proposer=propose_placeholders,
        max_draft_tokens=3,
    )  # fmt: skip
    for key, count in enumerate(max_tokens):
        scheduler.add(
            GenerateRequest(key, (1, 2, 3, 4), SamplingParams(max_tokens=count, temperature=0), 0, frozenset())
        )
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult.of_tokens(10 * (key + 1) for key in range(len(max_tokens))))
    return pack(scheduler.schedule(), block_size=4, draft=True)


def count_up(seen):
    """Return a draft model that continues each token with the next number, and records its batches."""

    def forward(batch):
        seen.append(batch)
        return torch.nn.functional.one_hot(batch.input_ids[0] + 1, VOCAB).float()

    return forward


def test_each_round_continues_the_tokens_of_the_one_before():
    """The third sequence has room for one draft token only."""
    batch = drafted_batch([9, 9, 3])
    seen = []
    ids = propose(batch, batch.drafting, count_up(seen)).input_ids
    assert ids.tolist() == [[10, 11, 12, 13, 20, 21, 22, 23, 30, 31]]
    assert [one.input_ids.tolist() for one in seen] == [[[10, 20, 30]], [[11, 21]], [[12, 22]]]
    assert [one.paging.context_lens.tolist() for one in seen] == [[5, 5, 5], [6, 6], [7, 7]]


def test_rounds_write_to_the_blocks_of_their_sequences():
    batch = drafted_batch([9, 9])
    seen = []
    propose(batch, batch.drafting, count_up(seen))
    for number, one in enumerate(seen):
        assert torch.equal(one.paging.slots, batch.paging.slots.reshape(2, 4)[:, number])
        assert torch.equal(one.paging.block_tables, batch.paging.block_tables)


def test_logits_that_are_not_finite_propose_a_valid_token():
    """The model verifies it in any case."""
    batch = drafted_batch([9])
    ids = propose(batch, batch.drafting, lambda one: torch.full((1, VOCAB), float("nan"))).input_ids
    assert ids.tolist() == [[10, 0, 0, 0]]
