"""With `batch_invariant`, requests get the same bits alone and in every batch, whatever mechanism computes them."""

import random
import time
from contextlib import ExitStack

import pytest
from transformers import Qwen3Config

from paged_backend.execution import cpu_threads
from paged_backend.models import linear
from tests.support.adapters import LORA, make_adapter, write_adapter_list
from tests.support.families import COMMON, FAMILIES
from tests.support.in_process import running, save_tiny
from tests.support.invariance import INVARIANT, Ask, random_asks, run, run_alone
from tests.support.pairwise import mostly_nightly
from tests.support.redis_server import needs_redis, running_redis
from tests.support.tiny_family import TinyFamily

QUANTIZED = ("int8 weights", "int4 weights")
CASES = {  # family and options
    "plain": ("qwen3", {}),
    "float16": ("llama", {"dtype": "float16"}),
    "int8 cache": ("qwen3", {"kv_cache_dtype": "int8"}),
    "fp8 cache": ("qwen3", {"kv_cache_dtype": "fp8"}),
    "int8 weights": ("llama", {"quantization": "int8"}),
    "int4 weights": ("llama", {"quantization": "int4"}),
    "adapters": ("llama", LORA),
    "sliding window": ("mistral_window", {}),
    "sliding windows and softcap": ("gemma2", {}),
    "latents": ("deepseek_v3", {}),
    "experts": ("qwen3_moe", {}),
    "experts, windows and sinks": ("gpt_oss", {}),
    "gated delta net": ("qwen3_next", {}),
    "Mamba 2 beside attention": ("falcon_h1", {}),
    "short convolutions": ("lfm2", {}),
}
NIGHTLY = (
    *("float16", "int8 cache", "fp8 cache", "int8 weights", "sliding window", "experts"),
    *("Mamba 2 beside attention", "short convolutions"),
)
RECURRENT = ("gated delta net", "Mamba 2 beside attention", "short convolutions")
MODES = (
    {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 80},
    {"max_num_batched_tokens": 9, "block_size": 2, "num_gpu_blocks_override": 70, "preemption_mode": "recompute"},
    {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 30, "swap_space": 0.01, "preemption_mode": "swap"},
    {"num_speculative_tokens": 3, "num_gpu_blocks_override": 60},
    {"async_scheduling": True, "num_gpu_blocks_override": 50, "block_size": 4, "max_num_batched_tokens": 21},
    {"max_num_seqs": 3, "block_size": 16, "num_gpu_blocks_override": 20},
)


@pytest.fixture(scope="module")
def family_of(tmp_path_factory):
    made = {}

    def find(name):
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            if name == "deepseek_v3":  # PyTorch computes the router's sigmoid: one bit for all batches needs 64 experts
                config = FAMILIES[name]()
                config.n_routed_experts = 64
                made[name] = TinyFamily(name, path, save_tiny(config, path))
            else:
                made[name] = TinyFamily.create(name, path)
        return made[name]

    return find


@pytest.fixture(scope="module")
def adapters_of(tmp_path_factory):
    def write(family):
        folder = tmp_path_factory.mktemp("adapters")
        paths = {name: make_adapter(family.model, folder / name, seed=seed) for seed, name in enumerate(("a", "b"))}
        return write_adapter_list(folder, paths)

    return write


@pytest.fixture
def quantizes_small_weights(monkeypatch):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 1)


def compare(family, asks, modes, **options):
    """Run requests alone, then together in each mode, twice. Returns the number of positions that were compared, and
    the statistics of the engines."""
    alone, count, stats = run_alone(family, asks, **options), 0, []
    for mode in modes:
        with running(family.assembly(**INVARIANT | options | mode)) as engine:
            for _ in range(2):
                for ask, one, other in zip(asks, alone, run(engine, asks), strict=True):
                    assert one == other, f"{mode}: {ask}"
                    count += ask.fingerprints
            stats.append(engine.history[-1].stats)
    return count, stats


@pytest.mark.parametrize("case", mostly_nightly(CASES, default=set(CASES) - set(NIGHTLY)))
def test_random_requests_get_the_same_bits_in_every_batch(
    case, family_of, adapters_of, quantizes_small_weights, figures
):
    family, options = family_of(CASES[case][0]), dict(CASES[case][1])
    rng, names = random.Random(case), (None,)
    if case == "adapters":
        options["adapters"], names = adapters_of(family), (None, "a", "b")
    asks = random_asks(rng, 4 if case in RECURRENT else 6, adapters=names)
    count, _ = compare(family, asks, MODES if case == "plain" else rng.sample(MODES, 2), **options)
    figures(f"{count:,} positions with the same bits")


@pytest.mark.nightly
def test_a_million_positions_have_the_same_bits(family_of, adapters_of, quantizes_small_weights, hours, figures):
    until, count, rounds = time.monotonic() + 3600 * hours, 0, 0
    while count < 1_000_000 and time.monotonic() < until:
        for case, (name, options) in CASES.items():
            family, names, more = family_of(name), (None,), {}
            if case == "adapters":
                more, names = {"adapters": adapters_of(family)}, (None, "a", "b")
            asks = random_asks(random.Random(f"{case} {rounds}"), 60, adapters=names)
            count += compare(family, asks, MODES, **options, **more)[0]
        rounds += 1
    figures(f"{count:,} positions with the same bits, of {rounds * len(CASES)} random loads")


PROMPT = tuple(random.Random(5).choices(range(3, 320), k=38))
SCORED = Ask(PROMPT, {"max_tokens": 12, "logits_digest": True, "prompt_logprobs": 3, "logprobs": 20})
UNSCORED = Ask(PROMPT, {"max_tokens": 12, "logits_digest": True, "logprobs": 20})
OTHERS = random_asks(random.Random(6), 6)
SAMPLES = Ask(PROMPT, {"max_tokens": 12, "logits_digest": True, "n": 3, "temperature": 1.0, "seed": 1})
REPEATED = Ask((PROMPT[:4] * 10)[:38], {"max_tokens": 12, "logits_digest": True})
TIERS = {"num_gpu_blocks_override": 26, "swap_space": 0.01, "tier_read_mode": "always"}
MECHANISMS = {  # what is compared, the options, the requests before and beside it, and the counter that shows it
    "other rows": (SCORED, {}, (), OTHERS, None),
    "chunks": (SCORED, {"max_num_batched_tokens": 8}, (), (), None),
    "block size 1": (SCORED, {"block_size": 1}, (), (), None),
    "block size 64": (SCORED, {"block_size": 64, "num_gpu_blocks_override": 16}, (), (), None),
    "placement of blocks": (SCORED, {"enable_prefix_caching": False}, OTHERS, (), None),
    "cache hit": (UNSCORED, {}, (UNSCORED,), (), "cached_tokens"),
    "host memory": (UNSCORED, TIERS, (UNSCORED, *OTHERS), (), "host_tokens"),
    "copy on write": (SAMPLES, {}, (), (), "copies"),
    "preemption by swap": (UNSCORED, TIERS | {"preemption_mode": "swap"}, (), OTHERS, "swapped"),
    "preemption by recomputation": (UNSCORED, TIERS | {"preemption_mode": "recompute"}, (), OTHERS, "recomputed"),
    "speculation": (REPEATED, {"num_speculative_tokens": 4}, (), OTHERS, "draft_tokens"),
    "asynchronous scheduling": (SCORED, {"async_scheduling": True}, (), OTHERS, None),
    "beams": (SCORED, {}, (), [Ask(PROMPT[:20], {"max_tokens": 10, "beam_width": 3})], None),
}


@pytest.fixture(scope="module")
def alone(family_of):
    """What the requests of MECHANISMS get alone."""
    asks = (SCORED, UNSCORED, SAMPLES, REPEATED)
    return dict(zip(map(id, asks), run_alone(family_of("qwen3"), asks), strict=True))


@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanism_changes_no_bit(name, family_of, alone):
    ask, options, before, beside, counter = MECHANISMS[name]
    with running(family_of("qwen3").assembly(**INVARIANT | options)) as engine:
        for one in before:
            run(engine, [one])
        found = run(engine, [*beside[:3], ask, *beside[3:]])[len(beside[:3])]
        stats = engine.history[-1].stats
    assert found == alone[id(ask)]
    assert counter is None or getattr(stats, counter) > 0


@pytest.mark.parametrize("tier", ["disk", pytest.param("remote", marks=needs_redis)])
def test_tier_changes_no_bit(tier, family_of, alone, tmp_path):
    """An engine that has computed nothing reads the blocks of another one."""
    options = {"swap_space": 0.01, "tier_read_mode": "always"}
    with ExitStack() as stack:
        if tier == "remote":
            store = stack.enter_context(running_redis(tmp_path))
            options |= {"remote_cache_url": store.url, "remote_cache_timeout_ms": 60_000}
        else:
            options["disk_cache_dir"] = str(tmp_path)
        for reads in (False, True):
            with running(family_of("qwen3").assembly(**INVARIANT | options)) as engine:
                assert run(engine, [UNSCORED, *OTHERS])[0] == alone[id(UNSCORED)]
                found = engine.engine.stats
                assert bool(getattr(found, f"{tier}_read")) == reads


def test_number_of_threads_changes_no_bit(family_of, alone, monkeypatch):
    for count in (1, 3):
        monkeypatch.setattr(cpu_threads, "count_threads", lambda *args, count=count: count)
        with running(family_of("qwen3").assembly(**INVARIANT)) as engine:
            assert run(engine, [SCORED, *OTHERS])[0] == alone[id(SCORED)]


def test_turn_of_a_session_gets_the_bits_of_the_whole_prompt(family_of, alone):
    first = Ask(PROMPT[:20], {"max_tokens": 1, "session": "s"})
    second = Ask(PROMPT, dict(UNSCORED.sampling) | {"session": "s"})
    with running(family_of("qwen3").assembly(**INVARIANT)) as engine:
        run(engine, [first])
        assert run(engine, [second])[0] == alone[id(UNSCORED)]
        assert engine.history[-1].stats.cached_tokens >= len(PROMPT[:20])
        engine.engine.unpin("s")
        run(engine, [Ask(PROMPT[:5], {"max_tokens": 1})])  # after which the blocks are free


def test_draft_model_changes_no_bit(family_of, draft, alone):
    options = {"num_speculative_tokens": 3, "speculative_model": str(draft)}
    with running(family_of("qwen3").assembly(**INVARIANT | options)) as engine:
        assert run(engine, [SCORED, *OTHERS])[0] == alone[id(SCORED)]
        assert engine.history[-1].stats.draft_tokens > 0


def test_context_of_several_parts(tmp_path):
    """Attention of 1,100 keys, which the kernel divides into three parts."""
    config = Qwen3Config(**COMMON | {"max_position_embeddings": 2048}, head_dim=32)
    family = TinyFamily("qwen3", tmp_path, save_tiny(config, tmp_path))
    prompt = tuple(random.Random(7).choices(range(3, 320), k=1100))
    asks = [Ask(prompt, dict(SCORED.sampling)), *OTHERS]
    whole = run_alone(family, asks, max_num_batched_tokens=1200, num_gpu_blocks_override=100)
    sizes = {"num_gpu_blocks_override": 400}
    for mode in ({"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 500, "num_speculative_tokens": 3}):
        with running(family.assembly(**INVARIANT | sizes | mode)) as engine:
            for _ in range(2):
                assert run(engine, asks) == whole
