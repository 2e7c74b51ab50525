"""The KV cache, quantized or not: copies, swaps and cache hits of its blocks do not change the tokens."""

import random

import pytest
import torch

from paged_backend.kv import cache as kv_cache
from paged_backend.kv.cache import NO_ATTENTION, KVCache, LayerShape
from paged_backend.kv.ledger import Transfer
from paged_backend.kv.page_copier import PageCopier
from paged_backend.models.attention import UnsupportedModel
from paged_kernels.layer_cache import FORMATS, LayerCache, dequantize
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


def test_copy_without_scales_changes_tokens(tiny, prompts, kv, monkeypatch):
    """Shows that the test above would notice a missing scale."""
    monkeypatch.setattr(KVCache, "tensors", property(lambda self: tuple(t for t in whole(self) if t.dim() == 4)))
    with running(tiny_assembly(tiny[0], kv_cache_dtype=kv[0], num_gpu_blocks_override=256)) as engine:
        again = [[engine.generate([prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts] for _ in range(2)]
    assert again[1] != kv[1]


whole = KVCache.tensors.func


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
        per_block = kv_cache.bytes_per_block(spec.layers, 4, spec.kv_dtype)
        assert sum(tensor.nbytes for tensor in assembly.runner.kv.tensors) == blocks[name] * per_block
        assert all(tensor.shape[0] == blocks[name] for tensor in assembly.runner.kv.tensors)
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


@pytest.mark.parametrize("dtype", [*FORMATS, torch.bfloat16], ids=str)
def test_pinned_pool_is_one_allocation(monkeypatch, dtype):
    sizes = []
    monkeypatch.setattr(kv_cache, "pinned_zeros", lambda n: sizes.append(n) or torch.zeros(n, dtype=torch.uint8))
    layers = [LayerShape(2, 8), LayerShape(1, 16), LayerShape(3, 12, 4), LayerShape(1, 12, 8, latent=True)]
    options = dict(num_pages=3, block_size=4, dtype=dtype, device=torch.device("cpu"))
    pool, plain = KVCache.allocate(layers, pinned=True, **options), KVCache.allocate(layers, **options)
    assert sizes == [3 * kv_cache.bytes_per_block(layers, 4, dtype)]
    assert [(tensor.shape, tensor.dtype) for tensor in pool.tensors] == [
        (tensor.shape, tensor.dtype) for tensor in plain.tensors
    ]
    for value, tensor in enumerate(pool.tensors, 1):
        assert not tensor.any()
        assert tensor.is_contiguous()
        tensor.fill_(value)
    assert [float(tensor.float().mean()) for tensor in pool.tensors] == list(range(1, 1 + len(pool.tensors)))


def test_latents_of_deepseek_v3_take_a_seventieth_of_keys_and_values():
    """576 elements per token and layer, in place of 128 heads with keys of 192 and values of 128."""
    expanded, latent = LayerShape(128, 192, 128), LayerShape(1, 576, 512, latent=True)
    sizes = [kv_cache.bytes_per_block([layer], 1, torch.bfloat16) for layer in (expanded, latent)]
    assert sizes == [2 * 128 * (192 + 128), 2 * 576]
    pool = KVCache.allocate([latent], num_pages=3, block_size=4, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in pool.tensors) == 3 * 4 * sizes[1]
    assert pool.layers[0].values.data_ptr() == pool.layers[0].keys.data_ptr()


@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.get)
def test_every_pool_tensor_can_be_copied_by_block(dtype):
    """On a CPU PyTorch has no such operations for fp8."""
    shape = LayerShape(num_kv_heads=2, head_dim=8)
    pool = KVCache.allocate([shape] * 2, num_pages=3, block_size=4, dtype=dtype, device=torch.device("cpu"))
    for layer in pool.layers:
        for part, scales in layer.pools:
            part.copy_(torch.randn(part.shape).to(dtype))
            scales.uniform_()
    saved = [tensor[0].numpy().copy() for tensor in pool.tensors]
    expected = [dequantize(part[0], scales[0], torch.empty(2, 4, 8)) for x in pool.layers for part, scales in x.pools]
    PageCopier(pool).copy([Transfer(0, 2, pages=((0, 2),))])
    for tensor, content in zip(pool.tensors, saved, strict=True):
        tensor[1] = torch.from_numpy(content)
    for block in (1, 2):
        parts = [pair for layer in pool.layers for pair in layer.pools]
        found = [dequantize(part[block], scales[block], torch.empty(2, 4, 8)) for part, scales in parts]
        assert all(map(torch.equal, found, expected))


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
    pool = KVCache.allocate(layers, num_pages=3, block_size=4, dtype=torch.int8, device=cpu)
    assert [layer.keys.shape[1] for layer in pool.layers] == [2, 0, 1]
    assert len(pool.tensors) == 8
    assert sum(tensor.nbytes for tensor in pool.tensors) == 3 * kv_cache.bytes_per_block(layers, 4, torch.int8)
    without = KVCache.allocate([NO_ATTENTION], num_pages=3, block_size=4, dtype=torch.float32, device=cpu)
    assert without.tensors == () and without.device == cpu
