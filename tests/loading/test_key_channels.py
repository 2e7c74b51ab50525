"""Channels of keys that are much larger than others cost a KV cache in one byte hardly any accuracy."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.execution.batch import pack
from paged_backend.execution.runner import paged_logits
from paged_backend.execution.upload import DeviceUpload
from paged_backend.kv.cache import CacheLayout, KVCache
from paged_backend.loading.attention_probe import find_key_channels
from paged_backend.loading.verification import verify_model
from paged_backend.models.attention import scale_channels
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Plan
from paged_kernels.layer_cache import FORMATS, plain_channels
from tests.support.tiny_family import MATRIX_FAMILIES

PROMPT = random.Random(0).choices(range(3, 320), k=40)
LARGE = 40.0
CPU = torch.device("cpu")


def tiny(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        MATRIX_FAMILIES[family](), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


@torch.no_grad()
def enlarge(model, name):
    """Enlarge a bias of keys in the last two channels, which hardly rotate, or a weight in two channels."""
    for module in model.modules():
        if (projection := getattr(module, "k_proj", None)) is None:
            continue
        size = module.head_dim
        if name == "bias":
            projection.bias.view(-1, size)[:, [size // 2 - 1, size - 1]] = LARGE
        elif name == "weight":
            projection.weight.view(-1, size, projection.in_features)[:, [1, 1 + size // 2]] *= LARGE
        else:
            module.k_norm.weight[[1, 1 + size // 2]] *= LARGE
        if name != "bias":  # queries that do not make these channels decide everything
            rows = module.q_proj.weight if name == "weight" else module.q_norm.weight
            rows.view(-1, size, *rows.shape[1:])[:, [1, 1 + size // 2]] /= LARGE


@torch.inference_mode()
def log_probabilities(model, layers, dtype, *, scaled=True):
    kv = KVCache.allocate(CacheLayout.of(layers, 4, dtype), 16, CPU)
    if scaled:
        scale_channels(model, kv)
    sequence = Group(GenerateRequest(0, tuple(PROMPT), SamplingParams(), 0, frozenset())).leader
    sequence.tables = [list(range(len(PROMPT) // 4))]
    chunk = Chunk(sequence, 0, len(PROMPT), sampled_sequences=())
    batch = DeviceUpload(CPU)(pack(Plan((chunk,)), block_size=4))
    return paged_logits(model, replace(batch, sample_rows=torch.arange(len(PROMPT))), kv).log_softmax(-1)


@pytest.mark.parametrize(("family", "enlarged"), [("qwen2", "bias"), ("llama", "weight"), ("qwen3", "norm")])
@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.get)
def test_large_channels_of_keys_cost_little_accuracy(family, enlarged, dtype):
    model = tiny(family)
    enlarge(model, enlarged)
    layers = verify_model(model, block_size=4, kv_dtype=dtype)
    expected = log_probabilities(model, layers, torch.float32)
    scaled, plain = (
        (log_probabilities(model, layers, dtype, scaled=each) - expected).abs().mean() for each in (True, False)
    )
    if dtype == torch.int8 or enlarged == "bias":  # a code of fp8 has an exponent of its own
        assert scaled < plain / 3
    else:
        torch.testing.assert_close(scaled, plain, rtol=0.5, atol=1e-6)


def test_scores_with_softcaps_and_sinks_are_not_shifted():
    """A model with sinks and biases, and one with soft-capped scores."""
    for family in ("gpt_oss", "gemma2"):
        model = tiny(family)
        for name, parameter in model.named_parameters():
            if name.endswith("k_proj.bias"):
                parameter.data.fill_(LARGE)
        find_key_channels(model)
        found = [vars(module)["key_channels"] for module in model.modules() if "key_channels" in vars(module)]
        assert len(found) == model.config.num_hidden_layers
        assert not any(channels[0].any() for channels in found)


def test_factors_are_powers_of_two_with_their_inverses():
    model = tiny("llama")
    enlarge(model, "weight")
    find_key_channels(model)
    for module in (module for module in model.modules() if "key_channels" in vars(module)):
        center, factors, inverses = module.key_channels
        assert torch.equal(factors.log2(), factors.log2().round())
        assert torch.equal(factors * inverses, torch.ones_like(factors))
        assert inverses.max() == 1, "queries never become larger"
        assert factors.unique().numel() > 1 and not center.any()


def test_a_cache_scales_nothing_until_the_model_says_so():
    layers = verify_model(tiny("llama"), block_size=4, kv_dtype=torch.int8)
    kv = KVCache.allocate(CacheLayout.of(layers, 4, torch.int8), 1, CPU)
    for cache in kv.layers:
        assert torch.equal(cache.key_channels, plain_channels(*cache.key_channels.shape[1:], CPU))
