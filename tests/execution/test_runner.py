"""Steps are launched without reading a value on the host: on the meta device, reading one raises."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.token_outputs import requested_outputs
from paged_backend.execution import graph_shapes
from paged_backend.execution.batch import pack
from paged_backend.execution.drafter import Drafter
from paged_backend.execution.runner import Runner
from paged_backend.execution.upload import map_tensors
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.cache import KVCache, LayerShape
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


@pytest.fixture
def kernels_without_values(monkeypatch):
    """Kernels that return tensors of the right shapes without computing."""
    results = {
        "paged_attention": lambda query, *_, **__: torch.empty_like(query),
        "rope_kv_write": lambda query, *_, **__: torch.empty_like(query),
        "kv_write": lambda *_: None,
        "add_rms_norm": pytorch.add_rms_norm,
        "swiglu": pytorch.swiglu,
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
    kv = KVCache.allocate([LayerShape(2, 8)] * 2, num_blocks=32, block_size=4, dtype=torch.float32, device=META)
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
    kv = KVCache.allocate([LayerShape(2, 8)] * 4, num_blocks=32, block_size=4, dtype=torch.float32, device=META)
    runner = Runner(model, kv, max_sampled=64, drafter=Drafter(model, kv.layer_range(2, 4)))
    runner._upload = lambda tree, head=None: map_tensors(tree, lambda tensor: tensor.to(META))
    replays = []

    def capture(step):
        logits = step()
        return lambda: replays.append(len(logits)) or logits

    if captured:
        shapes = graph_shapes.graph_shapes(8, 64, queries=4)
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
