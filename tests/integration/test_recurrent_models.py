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
from paged_backend.kv.cache import bytes_per_slot
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
    return tiny_assembly(path, **{"max_model_len": 64} | options)


@pytest.mark.parametrize(
    "family",
    mostly_nightly(HYBRID_FAMILIES, default=DEFAULT_HYBRIDS),
)
def test_tokens_match_generate(family, tmp_path):
    """Prompts in chunks of a small budget, beside sequences that decode; the second time in slots that were used."""
    model = save_tiny(HYBRID_FAMILIES[family](), tmp_path)
    prompts = random_prompts(random.Random(family), LENGTHS)
    expected = [generate_with_transformers(model, prompt, MAX_TOKENS) for prompt in prompts]
    with running(assembly_of(tmp_path, max_num_batched_tokens=11, max_state_checkpoints=100)) as engine:
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
    with running(assembly_of(path, num_gpu_blocks_override=20, max_num_batched_tokens=16)) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == expected
        assert engine.history[-1].stats.preemptions > 0


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


def test_checkpoints_without_recurrent_layers_are_logged(tiny, caplog):
    assembly_of(tiny[0], max_state_checkpoints=3)
    assert "max_state_checkpoints=3 has no effect: LlamaForCausalLM has no recurrent layers" in caplog.text


def test_disk_cache_without_a_host_pool_names_recurrent_layers(lfm2):
    with pytest.raises(ConfigError, match=r"disk_cache_dir=.*: needs a host pool; .* leave it out for .* recurrent"):
        assembly_of(lfm2, disk_cache_dir="cache")


def test_draft_model_with_states_is_rejected(tiny, lfm2):
    with pytest.raises(ConfigError, match=r"speculative_model=.*Lfm2ForCausalLM has recurrent layers; a draft model"):
        assembly_of(tiny[0], speculative_model=str(lfm2), num_speculative_tokens=2)


def test_states_that_do_not_fit_are_an_error_at_load(lfm2, monkeypatch):
    monkeypatch.setattr(pools, "available_memory", lambda: 10_000)
    monkeypatch.setattr(model_preparation, "rank_bytes", lambda *arguments: 0)  # what is free beside weights
    problem = r"max_num_seqs=8: the recurrent layers keep 2304 bytes for each sequence and .* free; lower one of"
    with pytest.raises(ConfigError, match=problem):
        assembly_of(lfm2, max_num_seqs=8)


def test_states_are_part_of_the_memory_budget(lfm2, monkeypatch):
    """On a CPU the pool takes half of what the states leave."""
    monkeypatch.setattr(pools, "available_memory", lambda: 16 * 2304 + 200_000)
    monkeypatch.setattr(model_preparation, "rank_bytes", lambda *arguments: 0)  # what is free beside weights
    assembly = assembly_of(lfm2, max_num_seqs=8, num_gpu_blocks_override=None)
    assert assembly.runner.states.num_slots == 8 + 8  # sequences and checkpoints
    block = assembly.runner.kv.memory[0].nbytes
    assert assembly.scheduler.blocks.num_pages == 100_000 // block


def test_states_are_part_of_the_pool_that_was_asked_for(lfm2):
    options = {"num_gpu_blocks_override": None, "max_model_len": 64, "max_num_seqs": 4, "max_state_checkpoints": 4}
    size = 1 << 20
    with_states = tiny_assembly(lfm2, **options, kv_cache_memory_bytes=size)
    slot = bytes_per_slot(with_states.loaded.spec.states)
    block = with_states.runner.kv.memory[0].nbytes
    assert with_states.scheduler.blocks.num_pages == (size - 8 * slot) // block
    with pytest.raises(ConfigError, match=f"must fit into kv_cache_memory_bytes={7 * slot}; lower"):
        tiny_assembly(lfm2, **options, kv_cache_memory_bytes=7 * slot)
    with pytest.raises(ConfigError, match=rf"takes \d+ bytes, and the recurrent states take {8 * slot}; give the pool"):
        tiny_assembly(lfm2, **options, kv_cache_memory_bytes=8 * slot + 1)


def test_states_of_draft_tokens_are_part_of_the_memory_budget(lfm2, monkeypatch):
    """No step has more draft tokens than the budget of tokens."""
    for count, slots in ((1, 8 + 8), (4, 8 + 16)):
        runner = assembly_of(lfm2, num_speculative_tokens=count, enable_prefix_caching=False).runner
        assert runner.states.num_slots == slots
    monkeypatch.setattr(pools, "available_memory", lambda: 10_000)
    monkeypatch.setattr(model_preparation, "rank_bytes", lambda *arguments: 0)
    problem = r"2304 bytes for each sequence, for each of 16 draft tokens \(.*\) and for each of 8 checkpoints"
    with pytest.raises(ConfigError, match=problem):
        assembly_of(lfm2, num_speculative_tokens=4)


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
    small = {"num_gpu_blocks_override": 17, "prompt_lookup_min": 1, "num_speculative_tokens": 3}
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
            assert 0 < stats.accepted_tokens < stats.draft_tokens
            assert stats.preemptions > 0


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
    options = {"preemption_mode": "swap", "num_gpu_blocks_override": 20, "max_num_batched_tokens": 16}
    for caching in (False, True):
        with running(assembly_of(path, swap_space=0.01, enable_prefix_caching=caching, **options)) as engine:
            assert engine.generate(prompts, max_tokens=MAX_TOKENS) == expected
            stats = engine.history[-1].stats
            assert stats.swapped == stats.preemptions > 0


def test_states_take_at_most_half_of_the_host_memory(lfm2):
    """One slot per sequence that may run, if so many fit; the rest is for blocks."""
    block = 4 * 2 * 2 * 16 * 4  # tokens, keys and values, heads, elements, bytes; in one layer
    for total, slots in ((8 * 2304 * 2, 8), (3 * 2304 * 2, 3), (2304 + block, 1)):
        runner = assembly_of(lfm2, swap_space=total / GIB, max_num_seqs=8).runner
        assert runner.host_states.num_slots == slots
        assert len(runner.host.memory) == (total - slots * 2304) // block


@pytest.mark.parametrize(
    ("nbytes", "problem"),
    [
        (2000, "the recurrent layers keep 2304 bytes for a sequence; give it more, or 0"),
        (2304 + 100, "one block of 4 tokens takes 1024 bytes and a recurrent state 2304 bytes; give it more, or 0"),
    ],
)
def test_host_memory_that_holds_no_state_is_an_error_at_load(lfm2, nbytes, problem):
    with pytest.raises(ConfigError, match=f"swap_space=.*: {problem}"):
        assembly_of(lfm2, swap_space=nbytes / GIB)


def test_model_without_attention_uses_all_host_memory_for_states(tmp_path):
    save_tiny(HYBRID_FAMILIES["mamba2"](), tmp_path)
    assembly = assembly_of(tmp_path, max_num_seqs=8)
    assert assembly.runner.host_states is None
    slot = sum(tensor[0].nbytes for tensor in assembly.runner.states.tensors)
    assert assembly_of(tmp_path, swap_space=5 * slot / GIB, max_num_seqs=8).runner.host_states.num_slots == 5
    with pytest.raises(ConfigError, match=f"swap_space=.*: the recurrent layers keep {slot} bytes for a sequence"):
        assembly_of(tmp_path, swap_space=0.5 * slot / GIB)


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


def test_no_checkpoints(served):
    path, prompts, expected = served
    with running(assembly_of(path, max_state_checkpoints=0)) as engine:
        for _ in range(2):
            assert engine.generate(prompts, max_tokens=MAX_TOKENS) == expected
        assert engine.history[-1].stats.cached_tokens == 0
