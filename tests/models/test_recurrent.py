"""Models with recurrent layers give the tokens of transformers, from states in any pages of a pool."""

import copy
import random

import pytest
import torch

from paged_backend.execution.batch import pack
from paged_backend.execution.runner import paged_logits
from paged_backend.kv.cache import TensorShape
from paged_backend.loading.verification import verify_model
from paged_backend.models import linear, recurrent
from paged_backend.models.attention import UnsupportedModel
from paged_backend.scheduling.plan import Chunk, Plan
from paged_kernels.cpu import native
from tests.support.families import DEFAULT_HYBRIDS, HYBRID_FAMILIES
from tests.support.in_process import generate_with_transformers, save_tiny
from tests.support.packed_steps import BLOCK_SIZE, PackedSteps, random_prompts
from tests.support.pairwise import mostly_nightly

LENGTHS = (1, 2, 5, 17, 24, 33)


@pytest.fixture(params=mostly_nightly(HYBRID_FAMILIES, default=DEFAULT_HYBRIDS))
def family(request):
    return request.param


@pytest.fixture
def model(family, tmp_path):
    return save_tiny(HYBRID_FAMILIES[family](), tmp_path)


def test_mixed_batches_match_generate(family, model):
    """Prompts in random chunks beside sequences that decode, at shuffled pages."""
    rng = random.Random(family)
    prompts = random_prompts(rng, LENGTHS)
    expected = [generate_with_transformers(model, prompt, 10) for prompt in prompts]
    assert PackedSteps(model, len(prompts), rng).generate(prompts, 10, max_chunk=9) == expected


def test_forks_and_host_copies_match_generate(family, model):
    """A fork continues from a copy of the state in another block, whatever the original computes meanwhile. A state
    that is read to the host continues in another block."""
    rng = random.Random(family)
    [prompt] = random_prompts(rng, [13])
    expected = generate_with_transformers(model, prompt, 12)
    changed = [*prompt, (expected[0] + 1) % 320]
    changed_tokens = generate_with_transformers(model, changed, 8)
    steps = PackedSteps(model, 4, rng)
    original = steps.sequence(prompt)
    steps.step((original, 7))
    steps.step((original, 6))
    fork = steps.fork(original)
    fork.tokens[-1] = changed[-1]
    for _ in range(4):
        steps.step((original, 1))
    for _ in range(4):
        steps.step((fork, 1), (original, 1))
    moved = steps.fork(original)
    pages, others = (steps.pages_of[one.tables[1][0]] for one in (original, moved))
    content = steps.kv.read(pages)
    steps.kv.write(pages, torch.full_like(content, 3))
    steps.kv.write(others, content)
    for _ in range(3):
        steps.step((moved, 1), (fork, 1))
    assert moved.tokens[len(prompt) :] == expected
    assert fork.tokens[len(changed) :][:7] == changed_tokens[:7]


def test_half_precision_passes_verification(family, model):
    """The states have the dtypes that transformers gives them: those of scans stay in float32."""
    half = copy.deepcopy(model).to(torch.bfloat16)
    verify_model(half, block_size=4, kv_dtype=torch.bfloat16)
    shapes = recurrent.state_shapes(half)
    assert len(shapes) == len(recurrent.recurrent_mixers(model)) > 0
    assert {shape.conv.dtype for shape in shapes} == {torch.bfloat16}
    assert {shape.recurrent.dtype for shape in shapes if shape.recurrent} <= {torch.float32}


def test_shapes_are_those_of_the_layers(tmp_path):
    model = save_tiny(HYBRID_FAMILIES["qwen3_next"](), tmp_path)
    layers = verify_model(model, block_size=4, kv_dtype=torch.float32)
    assert [layer.num_kv_heads for layer in layers] == [0, 2, 0, 2]
    for shape in recurrent.state_shapes(model):
        assert shape.conv == TensorShape((2 * 2 * 8 + 4 * 8, 4), torch.float32)
        assert shape.recurrent == TensorShape((4, 8, 8), torch.float32)


def test_wrong_states_are_rejected(tmp_path, monkeypatch):
    """The verification detects a mixer that starts every chunk from the zero state."""
    model = save_tiny(HYBRID_FAMILIES["jamba"](), tmp_path)
    monkeypatch.setattr(recurrent, "SINGLE_STEP", set())
    with pytest.raises(UnsupportedModel, match=r"JambaForCausalLM .* logits at position"):
        verify_model(model, block_size=4, kv_dtype=torch.float32)


@pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
def test_linear_layers_of_mixers_are_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    model = save_tiny(HYBRID_FAMILIES["bamba"](), tmp_path)
    verify_model(model, block_size=4, kv_dtype=torch.float32)
    assert model.model.layers[0].mamba.in_proj.weight.numel() == 0


def test_step_without_states_is_an_error(tmp_path):
    steps = PackedSteps(save_tiny(HYBRID_FAMILIES["lfm2"](), tmp_path), 1, random.Random(0))
    sequence = steps.sequence([3, 4, 5])
    sequence.tables.pop()
    batch = pack(Plan((Chunk(sequence, 0, 3, (sequence,)),)), block_size=BLOCK_SIZE)
    with pytest.raises(UnsupportedModel, match="Lfm2ShortConv: the step has no states"):
        paged_logits(steps.model, batch, steps.kv)
