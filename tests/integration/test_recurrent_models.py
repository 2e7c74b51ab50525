"""Models with recurrent layers in the engine: the tokens of transformers, whatever runs beside them."""

import random
import re

import pytest
import torch
import transformers as hf

from paged_backend.api.errors import ConfigError, ErrorCode
from paged_backend.api.sizes import GIB
from paged_backend.engine import model_preparation, pools
from paged_backend.engine.model_preparation import log_restrictions
from paged_backend.kv.cache import state_nbytes
from tests.support.families import DEFAULT_HYBRIDS, HYBRID_FAMILIES
from tests.support.in_process import WAIT, generate_with_transformers, running, save_tiny, tiny_assembly
from tests.support.packed_steps import random_prompts
from tests.support.pairwise import mostly_nightly

LENGTHS = (1, 5, 17, 33)
MAX_TOKENS = 12
FEW_TOKENS = [11, 12, 13, 14]


@pytest.fixture(scope="module", params=mostly_nightly(DEFAULT_HYBRIDS, default=["qwen3_next"]))
def served(request, tmp_path_factory):
    """(directory, prompts, their tokens by transformers) of a model."""
    path = tmp_path_factory.mktemp(request.param)
    model = save_tiny(HYBRID_FAMILIES[request.param](), path)
    prompts = random_prompts(random.Random(request.param), LENGTHS)
    return path, prompts, [generate_with_transformers(model, prompt, MAX_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory):
    path = tmp_path_factory.mktemp("lfm2")
    save_tiny(HYBRID_FAMILIES["lfm2"](), path)
    return path


def assembly_of(path, **options):
    return tiny_assembly(path, **{"max_model_len": 64, "num_gpu_blocks_override": 256} | options)


def tight_pool(path):
    """Return options for a pool with a page more than the longest request needs, and whether requests are preempted
    there: not if they only need states, which do not grow."""
    layout = assembly_of(path).scheduler.blocks.layout
    return {"num_gpu_blocks_override": layout.pages_for([64], [64], 0) + 1}, layout.pages > 1


@pytest.mark.parametrize(
    "family",
    mostly_nightly(HYBRID_FAMILIES, default=DEFAULT_HYBRIDS),
)
def test_tokens_match_generate(family, tmp_path):
    """Prompts in chunks of a small budget, beside sequences that decode; the second time in pages that were used."""
    model = save_tiny(HYBRID_FAMILIES[family](), tmp_path)
    prompts = random_prompts(random.Random(family), LENGTHS)
    expected = [generate_with_transformers(model, prompt, MAX_TOKENS) for prompt in prompts]
    with running(assembly_of(tmp_path, max_num_batched_tokens=11)) as engine:
        for _ in range(2):
            assert engine.generate(prompts, max_tokens=MAX_TOKENS) == expected
        assert engine.history[-1].stats.cached_tokens > 0  # the states at block boundaries were kept


def test_steps_ahead_match_generate(served):
    """Steps that are planned before the results of the previous one are known."""
    path, prompts, expected = served
    with running(assembly_of(path, async_scheduling=True, max_num_batched_tokens=13)) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == expected


def test_preempted_requests_match_generate(served):
    path, prompts, expected = served
    small, preempts = tight_pool(path)
    with running(assembly_of(path, **small, max_num_batched_tokens=16)) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == expected
        assert (engine.history[-1].stats.preemptions > 0) == preempts


def test_samples_match_requests_of_their_own(served):
    """The samples of a request continue from copies of the state after the prompt."""
    path, prompts, _ = served
    sampling = {"temperature": 1.0, "max_tokens": 8}
    with running(assembly_of(path)) as engine:
        alone = [[engine.generate([prompt], seed=5 + index, **sampling)[0] for index in range(3)] for prompt in prompts]
        keys = [engine.submit(prompt, n=3, seed=5, **sampling) for prompt in prompts]
        samples = {(key, index): [] for key in keys for index in range(3)}
        while any(len(tokens) < 8 for tokens in samples.values()):
            for delta in engine.steps.get(timeout=WAIT).deltas:
                samples[delta.key, delta.sample] += delta.token_ids
        assert [[samples[key, index] for index in range(3)] for key in keys] == alone


def test_beams_match_transformers(served):
    path, prompts, _ = served
    model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompts[3]])
    found = model.generate(ids, num_beams=3, max_new_tokens=8, do_sample=False, pad_token_id=0)
    with running(assembly_of(path)) as engine:
        assert engine.generate([prompts[3]], beam_width=3, max_tokens=8) == [found[0, len(prompts[3]) :].tolist()]


def test_failed_step_fails_its_requests_and_the_engine_continues(served):
    path, prompts, expected = served
    assembly = assembly_of(path)
    launch, errors = assembly.runner.launch, iter([None, None, RuntimeError("device error")])

    def fail_once(batch):
        if error := next(errors, None):
            raise error
        return launch(batch)

    assembly.runner.launch = fail_once
    with running(assembly) as engine:
        (output,) = engine.wait(engine.submit(prompts[0], max_tokens=9))
        assert output.error.code is ErrorCode.INTERNAL
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_lora": True}, "enable_lora=true"),
        ({"swap_space": 0.01, "disk_cache_dir": "cache"}, 'disk_cache_dir="cache"'),
        (
            {"swap_space": 0.01, "remote_cache_url": "redis://user:password@h"},
            re.escape('remote_cache_url="redis://***@h"'),
        ),
    ],
)
def test_option_that_states_exclude_is_rejected(lfm2, options, named):
    problem = f"{named}: not supported for Lfm2ForCausalLM, which has recurrent layers; leave it out"
    with pytest.raises(ConfigError, match=problem):
        assembly_of(lfm2, **options)


def test_disk_cache_without_a_host_pool_names_recurrent_layers(lfm2):
    with pytest.raises(ConfigError, match=r"disk_cache_dir=.*: needs a host pool; .* leave it out for .* recurrent"):
        assembly_of(lfm2, disk_cache_dir="cache")


def test_no_memory_is_set_aside_for_states(lfm2, monkeypatch):
    """The pool is as large as that of a model without them, however many sequences and draft tokens there may be."""
    monkeypatch.setattr(pools, "available_memory", lambda: 200_000)
    monkeypatch.setattr(model_preparation, "rank_bytes", lambda *arguments: 0)
    for seqs, drafts in ((1, 0), (64, 4)):
        options = {"max_num_seqs": seqs, "num_speculative_tokens": drafts, "max_num_batched_tokens": 64}
        assembly = assembly_of(lfm2, **options, num_gpu_blocks_override=None)
        assert assembly.scheduler.blocks.num_pages == len(assembly.runner.kv.memory) == 100_000 // 1024
        assert assembly.scheduler.blocks.layout.kinds[1].pages == 3  # of 1,024 bytes, for 3 tensors of 768


def test_a_pool_that_holds_no_state_is_an_error_at_load(lfm2):
    problem = "one block of 4 tokens takes 1024 bytes, and the recurrent layers keep 3072 bytes for a sequence"
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes=4095: {problem}; give it more memory"):
        assembly_of(lfm2, num_gpu_blocks_override=None, kv_cache_memory_bytes=4095)
    with pytest.raises(ConfigError, match=f"num_gpu_blocks_override=3: {problem}; give it more memory"):
        assembly_of(lfm2, num_gpu_blocks_override=3)
    with pytest.raises(ConfigError, match=f"swap_space=.*: {problem}; give it more, or 0"):
        assembly_of(lfm2, swap_space=4095 / GIB)
    assembly = assembly_of(lfm2, swap_space=4096 / GIB)
    assert len(assembly.runner.host.memory) == 4


def test_a_page_of_a_model_without_attention_is_a_state(tmp_path):
    """Its blocks of tokens take no memory."""
    save_tiny(HYBRID_FAMILIES["mamba2"](), tmp_path)
    assembly = assembly_of(tmp_path, num_gpu_blocks_override=1)
    state = assembly.runner.kv.page_bytes
    assert state_nbytes(assembly.loaded.spec.states) <= state == len(assembly.runner.kv.memory.view(-1))
    with running(assembly) as engine:
        engine.generate([[5] * 30], max_tokens=30)
    with pytest.raises(ConfigError, match=f"swap_space=.*: the recurrent layers keep {state} bytes for a sequence"):
        assembly_of(tmp_path, swap_space=0.5 * state / GIB)


def test_draft_model_with_states_is_rejected(tiny, lfm2):
    with pytest.raises(ConfigError, match=r"speculative_model=.*Lfm2ForCausalLM has recurrent layers; a draft model"):
        assembly_of(tiny[0], speculative_model=str(lfm2), num_speculative_tokens=2)


def test_restrictions_are_logged_on_a_gpu(lfm2, caplog):
    loaded = assembly_of(lfm2).loaded
    assert "recurrent" not in caplog.text
    log_restrictions(loaded, torch.device("cuda"))
    assert "Lfm2ForCausalLM has recurrent layers: served without CUDA graphs" in caplog.text


@pytest.mark.parametrize("family", mostly_nightly(HYBRID_FAMILIES, default=["falcon_h1", "qwen3_next"]))
def test_draft_model_does_not_change_tokens(family, tiny, tmp_path):
    """With two tokens to choose from, a draft model with other weights often chooses the same."""
    model = save_tiny(HYBRID_FAMILIES[family](), tmp_path)
    prompts, few = random_prompts(random.Random(family), LENGTHS[:3]), FEW_TOKENS[:2]
    others = sorted(set(range(320)) - set(few))
    expected = [generate_with_transformers(model, prompt, MAX_TOKENS, suppress_tokens=others) for prompt in prompts]
    options = {"speculative_model": str(tiny[0]), "num_speculative_tokens": 3, "max_num_batched_tokens": 24}
    with running(assembly_of(tmp_path, **options)) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS, allowed_token_ids=few) == expected
        stats = engine.history[-1].stats
        assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_speculation_with_preemption_and_samples(served):
    """Draft tokens beside chunks of prompts, samples that fork, and requests that are swapped or computed again."""
    path, prompts, _ = served
    sampling = {"temperature": 1.0, "max_tokens": 12, "allowed_token_ids": FEW_TOKENS}
    with running(assembly_of(path)) as engine:
        alone = [[engine.generate([prompt], seed=5 + index, **sampling)[0] for index in range(2)] for prompt in prompts]
    small, preempts = tight_pool(path)
    small |= {"prompt_lookup_min": 1, "num_speculative_tokens": 3}
    for mode in ("swap", "recompute"):
        with running(assembly_of(path, swap_space=0.01, preemption_mode=mode, **small)) as engine:
            keys = [engine.submit(prompt, n=2, seed=5, **sampling) for prompt in prompts]
            samples = {(key, index): [] for key in keys for index in range(2)}
            while any(len(tokens) < 12 for tokens in samples.values()):
                step = engine.steps.get(timeout=WAIT)
                for delta in step.deltas:
                    samples[delta.key, delta.sample] += delta.token_ids
            assert [[samples[key, index] for index in range(2)] for key in keys] == alone
            stats = step.stats
            if preempts:  # else there is no room for states after draft tokens
                assert 0 < stats.accepted_tokens < stats.draft_tokens
            assert (stats.preemptions > 0) == preempts


def test_conversation_with_draft_tokens_continues_from_its_state(served):
    """The state at the last block boundary is kept, even if a step has passed it with accepted draft tokens."""
    path, prompts, _ = served
    model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    others = sorted(set(range(320)) - set(FEW_TOKENS))
    conversation, cached, computed = list(prompts[2]), 0, 0
    options = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "max_model_len": 64}
    with running(assembly_of(path, **options)) as engine:
        for _ in range(3):
            expected = generate_with_transformers(model, conversation, 13, suppress_tokens=others)
            assert engine.generate([conversation], max_tokens=13, allowed_token_ids=FEW_TOKENS) == [expected]
            stats = engine.history[-1].stats
            assert stats.cached_tokens == cached + computed // 4 * 4
            cached, computed = stats.cached_tokens, len(conversation) + 12
            conversation += [*expected, 5, 6]
        assert stats.accepted_tokens > 0


def test_swapped_requests_match_generate(served):
    """Also with checkpoints on the device."""
    path, prompts, expected = served
    small, preempts = tight_pool(path)
    options = {"preemption_mode": "swap", "max_num_batched_tokens": 16} | small
    for caching in (False, True):
        with running(assembly_of(path, swap_space=0.01, enable_prefix_caching=caching, **options)) as engine:
            assert engine.generate(prompts, max_tokens=MAX_TOKENS) == expected
            stats = engine.history[-1].stats
            assert stats.swapped == stats.preemptions
            assert (stats.preemptions > 0) == preempts


def test_conversation_continues_from_its_state(served):
    """Each prompt is the conversation so far and two more tokens; the state after its last full block was kept."""
    path, prompts, _ = served
    model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    conversation, computed, cached = list(prompts[2]), 0, 0
    with running(assembly_of(path)) as engine:
        for _ in range(3):
            expected = generate_with_transformers(model, conversation, 9)
            assert engine.generate([conversation], max_tokens=9) == [expected]
            cached += computed // 4 * 4
            assert engine.history[-1].stats.cached_tokens == cached
            computed = len(conversation) + 8  # the last token is never computed
            conversation += [*expected, 5, 6]
