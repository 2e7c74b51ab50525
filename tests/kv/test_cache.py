"""The KV cache, quantized or not: copies, swaps and cache hits of its blocks do not change the tokens."""

import random

import pytest
import torch

from paged_backend.kv import cache as kv_cache
from paged_backend.kv.cache import NO_ATTENTION, CacheLayout, KVCache, LayerShape
from paged_backend.models.attention import UnsupportedModel
from paged_kernels.layer_cache import LayerCache
from paged_kernels.ops import kv_write, rope_kv_write
from tests.support.in_process import running, tiny_assembly

MAX_TOKENS = 16
CACHES = ["fp8", "int8"]


@pytest.fixture(scope="module")
def prompts():
    rnd = random.Random(1)
    return [[rnd.randrange(3, 320) for _ in range(length)] for length in (1, 2, 7, 16, 17, 31, 48, 64, 90)]


@pytest.fixture(scope="module", params=CACHES)
def kv(request, tiny, prompts):
    """(kv_cache_dtype, the tokens of each prompt when it runs alone, without prefix caching)."""
    options = {"kv_cache_dtype": request.param, "enable_prefix_caching": False, "max_num_batched_tokens": 256}
    with running(tiny_assembly(tiny[0], **options)) as engine:
        yield request.param, [engine.generate([prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts]


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_block_sizes(tiny, prompts, kv, block_size):
    options = {"block_size": block_size, "num_gpu_blocks_override": 16 + 1024 // block_size}
    with running(tiny_assembly(tiny[0], kv_cache_dtype=kv[0], **options)) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == kv[1]


@pytest.mark.parametrize("swap_space", [0, 0.01])
def test_chunks_and_preemption(tiny, prompts, kv, swap_space):
    options = {"num_gpu_blocks_override": 27, "max_num_batched_tokens": 9, "enable_prefix_caching": False}
    options |= {"swap_space": swap_space, "preemption_mode": "swap"}
    with running(tiny_assembly(tiny[0], kv_cache_dtype=kv[0], **options)) as engine:
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == kv[1]
        stats = engine.history[-1].stats
        assert stats.preemptions > 0
        assert stats.swapped == (stats.preemptions if swap_space else 0)


def test_prefix_hits_and_copy_on_write(tiny, prompts, kv):
    """Repeat every prompt, and fork one in the middle of a block, whose scales are copied with it."""
    with running(tiny_assembly(tiny[0], kv_cache_dtype=kv[0], num_gpu_blocks_override=256)) as engine:
        for _ in range(2):
            assert [engine.generate([prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts] == kv[1]
        assert engine.history[-1].stats.cached_tokens > sum(map(len, prompts)) / 2
        copies = engine.history[-1].stats.copies
        assert copies > 0
        fork = [*prompts[-1][:62], 5, 6, 7]
        forked = engine.generate([fork], max_tokens=MAX_TOKENS)
        assert engine.history[-1].stats.copies > copies
        assert engine.generate([prompts[-1]], max_tokens=MAX_TOKENS) == [kv[1][-1]]
    with running(tiny_assembly(tiny[0], kv_cache_dtype=kv[0], enable_prefix_caching=False)) as engine:
        assert engine.generate([fork], max_tokens=MAX_TOKENS) == forked


@pytest.mark.parametrize(("name", "dtype"), [("auto", torch.float32), ("fp8_e4m3", torch.float8_e4m3fn)])
def test_pool_has_the_requested_dtype(tiny, name, dtype):
    pool = tiny_assembly(tiny[0], kv_cache_dtype=name).runner.kv
    assert {layer.keys.dtype for layer in pool.layers} == {dtype}


def test_quantized_pool_holds_more_tokens(tiny):
    blocks = {}
    for name in ("auto", *CACHES):
        options = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 100_000, "kv_cache_dtype": name}
        assembly = tiny_assembly(tiny[0], **options)
        blocks[name] = assembly.scheduler.blocks.num_pages
        spec = assembly.loaded.spec
        memory = assembly.runner.kv.memory
        assert memory.shape == (blocks[name], 4 * kv_cache.bytes_per_token(spec.layers, spec.kv_dtype))
    # 3 layers, keys and values, 2 heads, 4 tokens: 16 elements of 4 bytes, or of 1 and a scale of 4.
    assert blocks == {"auto": 100_000 // (48 * 64), "fp8": 100_000 // (48 * 20), "int8": 100_000 // (48 * 20)}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *CACHES])
def test_bfloat16_tokens_are_likely_in_float32(tiny, prompts, kv_cache_dtype, monkeypatch):
    """`dtype: auto` is bfloat16 here. Outputs are greedy, with penalties (which make logits float32), and sampled."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assembly = tiny_assembly(tiny[0], dtype="auto", device="cpu", kv_cache_dtype=kv_cache_dtype)
    assert assembly.loaded.spec.dtype == torch.bfloat16
    greedy = [{}, {"presence_penalty": 0.01}]
    sampled = {"temperature": 1.0, "top_p": 0.1, "seed": 1}
    with running(assembly) as engine:
        for sampling in (*greedy, sampled):
            for prompt, tokens in zip(prompts, engine.generate(prompts, max_tokens=8, **sampling), strict=True):
                with torch.inference_mode():
                    logits = tiny[1](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
                better = (logits > logits.gather(1, torch.tensor(tokens)[:, None])).sum(1)
                assert len(tokens) == 8
                assert better.max() < 16  # of 320


def test_pinned_pool_is_one_allocation(monkeypatch):
    sizes = []
    monkeypatch.setattr(kv_cache, "pinned_zeros", lambda n: sizes.append(n) or torch.zeros(n, dtype=torch.uint8))
    layout = CacheLayout.of([LayerShape(2, 8), LayerShape(1, 16)], 4, torch.int8)
    pool = KVCache.allocate(layout, 3, torch.device("cpu"), pinned=True)
    assert sizes == [pool.memory.nbytes] == [3 * layout.page_bytes]


def test_latents_of_deepseek_v3_take_a_seventieth_of_keys_and_values():
    """576 elements per token and layer, in place of 128 heads with keys of 192 and values of 128."""
    expanded, latent = LayerShape(128, 192, 128), LayerShape(1, 576, 512, latent=True)
    sizes = [kv_cache.bytes_per_token([layer], torch.bfloat16) for layer in (expanded, latent)]
    assert sizes == [2 * 128 * (192 + 128), 2 * 576]
    pool = KVCache.allocate(CacheLayout.of([latent], 4, torch.bfloat16), 3, torch.device("cpu"))
    assert pool.memory.nbytes == 3 * 4 * sizes[1]
    assert pool.layers[0].values.data_ptr() == pool.layers[0].keys.data_ptr()


@pytest.mark.parametrize("kv_cache_dtype", CACHES)
def test_model_degraded_by_8_bit_kv_cache_is_rejected(tiny, monkeypatch, kv_cache_dtype):
    """The load-time check runs with the quantized pool, too."""

    def coarse(write):
        def spoil(*arguments, **named):
            result = write(*arguments, **named)
            cache = next(argument for argument in arguments if isinstance(argument, LayerCache))
            for scales in filter(torch.is_tensor, (cache.key_scales, cache.value_scales)):
                scales.mul_(3)
            return result

        return spoil

    monkeypatch.setattr("paged_backend.models.decoder.rope_kv_write", coarse(rope_kv_write))
    monkeypatch.setattr("paged_backend.models.attention.kv_write", coarse(kv_write))
    tiny_assembly(tiny[0])
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* keys and values \(kv_cache_dtype\), logits at"):
        tiny_assembly(tiny[0], kv_cache_dtype=kv_cache_dtype)


def test_layer_without_attention_takes_no_memory_and_keeps_its_index():
    layers, cpu = [LayerShape(2, 8), NO_ATTENTION, LayerShape(1, 4)], torch.device("cpu")
    pool = KVCache.allocate(CacheLayout.of(layers, 4, torch.int8), 3, cpu)
    assert [layer.keys.shape[1] for layer in pool.layers] == [2, 0, 1]
    assert pool.memory.nbytes == 3 * 4 * kv_cache.bytes_per_token(layers, torch.int8)
    without = KVCache.allocate(CacheLayout.of([NO_ATTENTION], 4, torch.float32), 3, cpu)
    assert without.memory.shape == (3, 0) and without.device == cpu
