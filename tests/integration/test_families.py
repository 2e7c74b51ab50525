"""Every model family generates the greedy tokens of transformers, whatever happens to the blocks of its requests."""

from dataclasses import replace
from functools import cache
from itertools import count
from threading import Event

import pytest
import transformers
from packaging.version import Version

from paged_backend.models.attention import UnsupportedModel
from tests.support.beams import MAX_TOKENS as NUM_BEAM_TOKENS
from tests.support.beams import beams
from tests.support.families import ACCEPTED_SINCE, COMMON, DEFAULT_FAMILIES, REJECTED_FAMILIES
from tests.support.in_process import WAIT, running, save_tiny, tiny_assembly
from tests.support.pairwise import mostly_nightly
from tests.support.tiny_family import MATRIX_FAMILIES, MAX_TOKENS, TinyFamily, describe_layers, serve_or_reject

# In a pool just large enough for the longest request. Without prefix caching, because the blocks of a preempted request
# would still be found in the pool, so that none came back from the host.
UNCACHED = {"enable_prefix_caching": False}
SWAPPED = UNCACHED | {"block_size": 8, "swap_space": 0.001, "preemption_mode": "swap"}
RECOMPUTED = UNCACHED | {"block_size": 16, "preemption_mode": "recompute"}
LOOKUP = {"num_speculative_tokens": 4, "prompt_lookup_min": 1}
FEW_TOKENS = [11, 12, 13, 14]  # with so few, prompt lookup often finds the next one


# One with each layout of keys and values: full attention, windows beside it, latents, states. What happens to blocks
# depends on nothing else; tests/integration/test_recurrent_models.py has more of states.
LAYOUTS = ("llama", "gemma3", "deepseek_v3_yarn", "lfm2")
for_each_layout = pytest.mark.parametrize("family", mostly_nightly(MATRIX_FAMILIES, default=LAYOUTS), indirect=True)


@pytest.fixture(scope="module")
def family_of(tmp_path_factory):
    """A function that returns the family of a name, which it creates once."""
    return cache(lambda name: TinyFamily.create(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=mostly_nightly(MATRIX_FAMILIES, default=DEFAULT_FAMILIES))
def family(request, family_of):
    return family_of(request.param)


@pytest.mark.parametrize("name", REJECTED_FAMILIES)
def test_other_families_are_rejected_at_load(name, tmp_path, support_matrix):
    if name in ACCEPTED_SINCE and Version(transformers.__version__) >= Version(ACCEPTED_SINCE[name]):
        pytest.skip(f"transformers {transformers.__version__} has the attention interface in this model")
    model = save_tiny(REJECTED_FAMILIES[name](), tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        tiny_assembly(tmp_path, max_model_len=64)
    message = str(caught.value).removeprefix(f"{tmp_path}: ")
    assert message.startswith(f"{type(model).__name__} cannot be served with paged attention: ")
    support_matrix.record(name, "load", "rejected", message)


@pytest.fixture
def serve(family, support_matrix):
    """A function that returns an assembly, or None if the options are rejected, which it records."""
    return lambda feature, field, **options: serve_or_reject(family, support_matrix, feature, field, **options)


@pytest.fixture(scope="module")
def assembly_of():
    return cache(TinyFamily.assembly)


@pytest.fixture
def assembly(family, assembly_of):
    """Steps have room for 16 tokens. Tests use cache salts of their own."""
    return assembly_of(family)


def salted(text):
    """Return the options of requests that find only blocks of each other in the prefix cache."""
    return {"max_tokens": MAX_TOKENS, "cache_salt": text}


def test_class_and_layers_are_in_the_table(family, support_matrix):
    support_matrix.describe(family.name, type(family.model).__name__, describe_layers(family.model))


def test_mixed_batch_with_chunked_prefill(family, assembly, support_matrix):
    for overlap in (False, True):
        with running(replace(assembly, overlap=overlap)) as engine:
            assert engine.generate(family.prompts, **salted(f"mixed {overlap}")) == family.outputs
            stats = [step.stats for step in engine.history]
            assert any(one.context_requests and one.generation_requests for one in stats)
            assert max(one.context_tokens for one in stats) <= 16 < max(map(len, family.prompts))
            assert stats[-1].cached_tokens == stats[0].cached_tokens
    support_matrix.record(family.name, "mixed batch", "tested")


@for_each_layout
def test_prefix_hit(family, assembly, support_matrix):
    with running(assembly) as engine:
        assert engine.generate(family.prompts, **salted("prefix")) == family.outputs
        before = engine.history[-1].stats.cached_tokens
        assert engine.generate(family.prompts, **salted("prefix")) == family.outputs
        assert engine.history[-1].stats.cached_tokens - before > 0.5 * sum(map(len, family.prompts))
    support_matrix.record(family.name, "prefix cache", "tested")


@for_each_layout
def test_samples_share_their_prompt(family, assembly, support_matrix):
    """Prompts do not end at the end of a block, so that the samples copy their last block."""
    with running(assembly) as engine:
        copies = assembly.scheduler.stats.copies
        for prompt, output in zip(family.prompts[1:4], family.outputs[1:4], strict=True):
            samples, _ = beams(engine, prompt, None, n=2, cache_salt="samples")
            assert samples == [output[:NUM_BEAM_TOKENS]] * 2
        assert assembly.scheduler.stats.copies > copies
    support_matrix.record(family.name, "samples", "tested")


@for_each_layout
def test_beam_search(family, assembly, support_matrix):
    prompt = family.prompts[2]
    with running(assembly) as engine:
        found = engine.generate([prompt, family.prompts[3]], beam_width=2, **salted("beams"))
        assert found == [family.generate(one, num_beams=2) for one in (prompt, family.prompts[3])]
    support_matrix.record(family.name, "beam search", "tested")


def hold_back_step(runner, number):
    """Make a runner wait before a step, until the returned event is set, so that requests arrive while others run."""
    launch, steps, arrived = runner.launch, count(), Event()

    def wait_and_launch(packed):
        if next(steps) == number:
            assert arrived.wait(WAIT)
        return launch(packed)

    runner.launch = wait_and_launch
    return arrived


@for_each_layout
@pytest.mark.parametrize(
    ("feature", "counter", "options"),
    [("swap", "swapped", SWAPPED), ("recompute", "recomputed", RECOMPUTED)],
    ids=["swap", "recompute"],
)
def test_preemption(family, assembly, serve, support_matrix, feature, counter, options):
    pool = family.smallest_pool(assembly, options["block_size"])
    small = serve(feature, "swap_space", num_gpu_blocks_override=pool, **options)
    if small is None:
        return
    arrived = hold_back_step(small.runner, 5)
    with running(small) as engine:
        first = engine.submit(family.prompts[-1], max_tokens=MAX_TOKENS, priority=1)
        while not engine.outputs[first].tokens:
            engine.step()
        others = [engine.submit(prompt, max_tokens=MAX_TOKENS) for prompt in family.prompts[::-1]]
        arrived.set()
        outputs = [output.tokens for output in engine.wait(first, *others)]
        assert outputs == [family.outputs[-1], *family.outputs[::-1]]
        stats = engine.history[-1].stats
        assert getattr(stats, counter) == stats.preemptions > 0
        assert (stats.moves_in > 0) == (feature == "swap")
    support_matrix.record(family.name, feature, "tested")


@for_each_layout
def test_speculation(family, serve, support_matrix):
    few = family.generate(family.prompts[2], suppress_tokens=sorted(set(range(320)) - set(FEW_TOKENS)))
    speculating = serve("speculation", "num_speculative_tokens", **LOOKUP)
    if speculating is None:
        return
    with running(speculating) as engine:
        assert engine.generate(family.prompts, max_tokens=MAX_TOKENS) == family.outputs
        assert engine.generate([family.prompts[2]], max_tokens=MAX_TOKENS, allowed_token_ids=FEW_TOKENS) == [few]
        stats = engine.history[-1].stats
        assert 0 < stats.accepted_tokens < stats.draft_tokens
    support_matrix.record(family.name, "speculation", "tested")


@for_each_layout
def test_a_conversation_computes_only_its_new_tokens(family, assembly):
    """And the last token of each turn, which was sampled and not computed. States are kept at the ends of blocks."""
    prompt, options = family.prompts[2], {"max_tokens": 6, "cache_salt": "conversation"}
    with running(assembly) as engine:
        for known in (0, 22, 30, 38):
            before = assembly.scheduler.stats.cached_tokens
            (output,) = engine.generate([prompt], **options)
            assert output == family.generate(prompt, 6)
            found = assembly.scheduler.stats.cached_tokens - before
            assert found == known if not assembly.loaded.spec.states else found >= max(0, known - 8)
            prompt = [*prompt, *output, *family.random_tokens(2)]


def test_layers_of_a_draft_model_share_the_pages_of_windows(family_of, tmp_path):
    """Its heads have another size. Blocks outside of the windows are freed all the same, also during preemption."""
    family, draft = family_of("gemma3"), transformers.LlamaConfig(**COMMON | {"head_dim": 24, "num_key_value_heads": 1})
    save_tiny(draft, tmp_path)
    options = SWAPPED | {"num_speculative_tokens": 2, "speculative_model": str(tmp_path)}
    roomy = family.assembly(**options)
    full, window = roomy.scheduler.blocks.layout.kinds
    assert full.keeps_all and not window.keeps_all
    assert len({layer.keys.shape for layer in roomy.runner.kv.layers}) == 2
    small = family.assembly(num_gpu_blocks_override=family.smallest_pool(roomy, options["block_size"]), **options)
    with running(small) as engine:
        assert engine.generate(family.prompts, max_tokens=MAX_TOKENS) == family.outputs
        assert engine.history[-1].stats.swapped > 0


@for_each_layout
def test_session(family, assembly, support_matrix):
    """The second turn computes only its own tokens, and the last one of the first turn."""
    with running(assembly) as engine:
        first, output = family.prompts[2], family.outputs[2]
        (turn,) = engine.wait(engine.submit(first, session="chat", **salted("session")))
        assert turn.tokens == output
        stats = assembly.scheduler.stats
        assert stats.blocks_pinned > 0
        prompt = first + output + family.random_tokens(7)
        (turn,) = engine.wait(engine.submit(prompt, session="chat", **salted("session")))
        assert turn.tokens == family.generate(prompt)
        kept = len(first + output) - 1
        if assembly.loaded.spec.states:  # which are kept at the ends of blocks
            kept = kept // 4 * 4
        assert assembly.scheduler.stats.cached_tokens - stats.cached_tokens >= kept
        engine.engine.unpin("chat")
        engine.generate([first], max_tokens=1)
    support_matrix.record(family.name, "session", "tested")
