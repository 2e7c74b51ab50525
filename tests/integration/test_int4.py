"""Full blocks of keys and values in four bits: every way in which an engine moves blocks gives the same tokens."""

import pytest
import torch
from transformers import LlamaConfig

from paged_backend.api.errors import ConfigError
from tests.support.in_process import WAIT, running, save_tiny, tiny_assembly
from tests.support.tiny_family import TinyFamily

OPTIONS = {"kv_cache_dtype": "int4", "block_size": 32, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 20}
LENGTHS = (31, 64, 100)
MAX_TOKENS = 36


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model with heads of 32 elements, the least that can be packed."""
    directory = tmp_path_factory.mktemp("model")
    save_tiny(
        LlamaConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
        ),
        directory,
    )
    return directory


@pytest.fixture(scope="module")
def prompts():
    """The last two begin with whole blocks of another one, and with all of it."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in LENGTHS]
    return [*made, made[2][:64] + made[0], made[2] + made[0]]


@pytest.fixture(scope="module")
def expected(directory, prompts):
    """The outputs of each prompt alone, in chunks of 64 tokens, without a prefix cache."""
    with running(tiny_assembly(directory, **OPTIONS, enable_prefix_caching=False)) as engine:
        return [engine.generate([prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 13},
        {"max_num_batched_tokens": 150},
        {"prompt_lookup_max": 3, "num_speculative_tokens": 3},
        {"num_gpu_blocks_override": 7, "preemption_mode": "swap", "swap_space": 0.01},
        {"num_gpu_blocks_override": 7, "preemption_mode": "recompute"},
    ],
    ids=str,
)
def test_outputs_depend_on_the_tokens_alone(options, directory, prompts, expected):
    """A query reads its own block in eight bits and all others in four, in whatever steps they were computed."""
    with running(tiny_assembly(directory, **OPTIONS | options)) as engine:
        for _ in range(2):  # the second time from the prefix cache
            assert [engine.generate([prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts] == expected
        together = engine.generate(prompts, max_tokens=MAX_TOKENS)
        stats = engine.assembly.scheduler.blocks.stats
    pairs = [
        pair for output, wanted in zip(together, expected, strict=True) for pair in zip(output, wanted, strict=True)
    ]
    agreed = sum(one == other for one, other in pairs)
    assert agreed >= 0.7 * len(pairs)  # rounding differs with the rows of a step, and moves codes
    if "swap_space" in options:
        assert stats["moves_out"] and stats["moves_in"]


def test_batches_do_not_change_the_outputs_of_a_batch_invariant_engine(directory, prompts):
    with running(tiny_assembly(directory, **OPTIONS, batch_invariant=True)) as engine:
        alone = [engine.generate([prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts]
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == alone


def test_beams_copy_blocks_in_four_and_eight_bits(directory, prompts):
    """A beam search whose beams share blocks finds what one without a prefix cache finds."""
    found = []
    for cached in (False, True):
        with running(tiny_assembly(directory, **OPTIONS, enable_prefix_caching=cached)) as engine:
            found += [engine.generate([prompts[0]], beam_width=3, max_tokens=MAX_TOKENS) for _ in range(2)]
    assert found == found[:1] * 4


def test_a_restarted_engine_reads_packed_blocks_from_disk(directory, prompts, expected, tmp_path):
    options = {"swap_space": 0.01, "disk_cache_dir": str(tmp_path / "kv"), "disk_cache_gib": 0.01}
    for stored in (0, 96):
        assembly = tiny_assembly(directory, **OPTIONS, **options)
        with running(assembly) as engine:
            output = engine.wait(engine.submit(prompts[2], max_tokens=MAX_TOKENS, returns_usage=True))[0]
        assert (output.tokens, output.usage.cached_tokens) == (expected[2], stored)
        assembly.close()


def test_samples_share_the_prompt(directory, prompts):
    """They get copies of the prompt's last block, in four and in eight bits."""
    sampling = {"temperature": 1.0, "max_tokens": 12}
    with running(tiny_assembly(directory, **OPTIONS)) as engine:
        alone = [engine.generate([prompts[0]], seed=5 + index, **sampling)[0] for index in range(3)]
        engine.submit(prompts[0], n=3, seed=5, **sampling)
        samples = [[], [], []]
        while any(len(tokens) < 12 for tokens in samples):
            for delta in engine.steps.get(timeout=WAIT).deltas:
                samples[delta.sample] += delta.token_ids
        assert samples == alone
        assert engine.assembly.scheduler.blocks.stats["copies"]


def test_long_sequences_hold_few_bytes(directory):
    """3.4 times as many tokens fit as in bfloat16."""
    held = {}
    for name in ("int4", "auto"):
        assembly = tiny_assembly(directory, **OPTIONS | {"kv_cache_dtype": name})
        layout = assembly.limits.layout
        held[name] = layout.pages_for([4096], [1], 0) * assembly.runner.kv.page_bytes
    assert held["auto"] / 2 / held["int4"] > 3.4


def test_layers_that_cannot_be_packed_are_rejected(tmp_path):
    family = TinyFamily.create("llama", tmp_path)
    with pytest.raises(ConfigError, match=r'kv_cache_dtype="int4": layer 0 has keys of \d+ elements'):
        tiny_assembly(family.directory, **OPTIONS)
