"""Every model family with LoRA adapters, quantized weights, a quantized KV cache and two ranks: it is served with the
expected tokens, or rejected with an error that names the option."""

import logging

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from paged_backend.engine import assembly
from paged_backend.models import linear
from paged_backend.models.attention import UnsupportedModel
from paged_kernels.cpu import native
from tests.support.adapters import LORA, generate_with, make_adapter, write_adapter_list
from tests.support.families import HYBRID_FAMILIES
from tests.support.in_process import running
from tests.support.pairwise import mostly_nightly
from tests.support.support_matrix import TESTED
from tests.support.tiny_family import MATRIX_FAMILIES, TinyFamily, serve_or_reject

MAX_TOKENS = 8
SOME_FAMILIES = ("llama", "gemma3", "gpt2", "mixtral", "deepseek_v3_yarn", "gpt_oss", "lfm2")
# Least share of tokens that are the most likely ones of the unquantized model, and their highest mean rank of 320.
# 4 bits change many tokens of a random model, in particular where they change the experts.
REFUSED_INT4 = "verification at load: 4-bit weights change the logits of this random model too much"
INT4_SHARE, SHARE = 0.1, 0.6
MAX_MEAN_RANK, INT4_MAX_MEAN_RANK = 20, 40

compiled = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")


@pytest.fixture(scope="module", params=mostly_nightly(MATRIX_FAMILIES, default=SOME_FAMILIES))
def family(request, tmp_path_factory):
    return TinyFamily.create(request.param, tmp_path_factory.mktemp("family"))


@pytest.fixture
def serve(family, support_matrix):
    """A function that returns an engine, or None if the family is rejected with an error that begins with the option,
    which it records."""

    return lambda feature, field, **options: serve_or_reject(family, support_matrix, feature, field, **options)


def linear_layers(model):
    """Return the names of all linear layers but the output layer, those that PEFT takes for experts, and those that
    latent attention has absorbed."""
    linear_types = torch.nn.Linear | Conv1D
    modules = [name for name, module in model.named_modules() if isinstance(module, linear_types)]
    output = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    is_deepseek = model.config.model_type.startswith("deepseek")
    return [name for name in modules if name != output and not (is_deepseek and (".mlp." in name or "kv_b" in name))]


def test_adapters_match_peft(family, serve, support_matrix):
    if family.name in HYBRID_FAMILIES:  # PEFT adapts only some of their layers
        listed = write_adapter_list(family.directory, {})
        assert serve("LoRA", "enable_lora", adapters=listed, **LORA) is None
        return
    adapters = {
        name: make_adapter(
            family.model, family.directory / name, seed=seed, r=rank, target_modules=linear_layers(family.model)
        )
        for seed, (name, rank) in enumerate((("one", 4), ("other", 7)))
    }
    listed = write_adapter_list(family.directory, adapters)
    assembly = serve("LoRA", "enable_lora", adapters=listed, **LORA)
    if assembly is None:
        return
    prompts = family.prompts[1:3]
    with running(assembly) as engine:
        pairs = [(name, prompt) for prompt in prompts for name in (*adapters, None)]
        keys = [engine.submit(prompt, max_tokens=MAX_TOKENS, lora_name=name) for name, prompt in pairs]
        found = [output.tokens for output in engine.wait(*keys)]
    expected = [
        generate_with(family.model, adapters[name], prompt, MAX_TOKENS) if name else family.generate(prompt, MAX_TOKENS)
        for name, prompt in pairs
    ]
    assert found == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "an adapter does not change the output"
    support_matrix.record(family.name, "LoRA", "tested")


@pytest.mark.parametrize("family", ["mixtral"], indirect=True)
def test_adapters_of_experts_are_rejected(family, caplog):
    adapter = make_adapter(
        family.model, family.directory / "experts", target_modules=["q_proj"], target_parameters=["experts.down_proj"]
    )
    assembly = family.assembly(adapters=write_adapter_list(family.directory, {"experts": adapter}), **LORA)
    with running(assembly) as engine:
        (output,) = engine.wait(engine.submit(family.prompts[0], lora_name="experts"))
    assert 'target_parameters=["experts.down_proj"]: not supported' in str(output.error)


@pytest.mark.nightly
@compiled
def test_int8_weights(family, serve, support_matrix, monkeypatch, caplog):
    check_quantized_weights(family, serve, support_matrix, monkeypatch, caplog, "int8")


@compiled
def test_int4_weights(family, serve, support_matrix, monkeypatch, caplog):
    check_quantized_weights(family, serve, support_matrix, monkeypatch, caplog, "int4")


def check_quantized_weights(family, serve, support_matrix, monkeypatch, caplog, bits):
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 0)
    caplog.set_level(logging.INFO, "paged_llm")
    try:
        assembly = serve(bits, "quantization", quantization=bits)
    except UnsupportedModel as error:
        if bits == "int8" or "differ from its eager attention" not in str(error):
            raise
        support_matrix.record(family.name, bits, "rejected", REFUSED_INT4)
        return
    if assembly:
        assert f"with {bits} weights" in caplog.text
        check_quantized_tokens(family, assembly, INT4_SHARE if bits == "int4" else SHARE)
        support_matrix.record(family.name, bits, "tested")


def test_int8_kv_cache(family, serve, support_matrix):
    check_quantized_kv_cache(family, serve, support_matrix, "int8", torch.int8)


@pytest.mark.nightly
def test_fp8_kv_cache(family, serve, support_matrix):
    check_quantized_kv_cache(family, serve, support_matrix, "fp8", torch.float8_e4m3fn)


def check_quantized_kv_cache(family, serve, support_matrix, name, dtype):
    if assembly := serve(f"{name} cache", "kv_cache_dtype", kv_cache_dtype=name):
        assert {layer.keys.dtype for layer in assembly.runner.kv.layers} == {dtype}
        check_quantized_tokens(family, assembly, SHARE)
        support_matrix.record(family.name, f"{name} cache", "tested")


@torch.inference_mode()
def check_quantized_tokens(family, assembly, least):
    """Check that tokens are the same alone and in a batch, and among the most likely ones of the unquantized model."""
    with running(assembly) as engine:
        together = engine.generate(family.prompts, max_tokens=MAX_TOKENS, cache_salt="together")
        assert [engine.generate([one], max_tokens=MAX_TOKENS)[0] for one in family.prompts] == together
    ranks = []
    for prompt, tokens in zip(family.prompts, together, strict=True):
        logits = family.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        ranks += (logits > logits.gather(1, torch.tensor(tokens)[:, None])).sum(1).tolist()
    assert ranks.count(0) >= least * len(ranks)
    limit = INT4_MAX_MEAN_RANK if least == INT4_SHARE else MAX_MEAN_RANK
    assert sum(ranks) <= limit * len(ranks)


class RanksStarted(Exception):
    pass


@pytest.mark.ranks
def test_tensor_parallelism_is_possible_or_rejected_before_ranks_start(family, serve, support_matrix, monkeypatch):
    """Otherwise the page has what test_two_ranks_generate_the_same_tokens finds, which is nightly for most families.
    Recurrent layers are found only when the ranks load the model."""

    def start(*arguments):
        raise RanksStarted

    monkeypatch.setattr(assembly, "Workers", start)
    try:
        assert serve("tensor parallelism", "tensor_parallel_size=2: ", tensor_parallel_size=2) is None
    except RanksStarted:
        result = support_matrix.documented(family.name, "tensor parallelism", TESTED)
        assert result == TESTED or "which has recurrent layers" in result.reason


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize("family", MATRIX_FAMILIES, indirect=True)
def test_two_ranks_generate_the_same_tokens(family, serve, support_matrix):
    assembly = serve("tensor parallelism", "tensor_parallel_size=2: ", tensor_parallel_size=2)
    if assembly is None:
        return
    try:
        with running(assembly) as engine:
            tokens = engine.generate(family.prompts, max_tokens=MAX_TOKENS)
    finally:
        assembly.close()
    assert tokens == [output[:MAX_TOKENS] for output in family.outputs]
    support_matrix.record(family.name, "tensor parallelism", "tested")
