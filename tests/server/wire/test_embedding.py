"""Embeddings: equal to transformers' normalized hidden states, whatever else is in the step."""

import json
import random
from array import array
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config

from paged_backend.api.errors import RequestError
from paged_backend.api.limits import EmbeddingSpec, EngineLimits
from paged_backend.api.request import FinishReason
from paged_backend.execution.forward import hidden_size
from paged_backend.loading.model_options import pick_embedding
from paged_backend.server.wire.pooling import EmbeddingCall, parse_pooling_sampling
from tests.support.in_process import running, save_tiny, tiny_assembly
from tests.support.recorded_graphs import CpuCapture

sync_and_async = pytest.mark.usefixtures("async_scheduling")
LIMITS = EngineLimits(64, 320, 256, 4, 8, embedding=EmbeddingSpec(64))


@pytest.fixture(scope="module")
def prompts():
    rnd = random.Random(5)
    return [[rnd.randrange(3, 320) for _ in range(length)] for length in (1, 6, 17, 40)]


def check(model, prompt, hidden):
    """Compare the hidden state of the prompt's last token with that of transformers."""
    with torch.inference_mode():
        expected = model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.tensor(hidden), expected, rtol=1e-4, atol=1e-4)


@sync_and_async
def test_hidden_states_match_transformers(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        keys = [engine.embed(prompt) for prompt in prompts]
        for prompt, output in zip(prompts, engine.wait(*keys), strict=True):
            check(tiny[1], prompt, output.hidden)
            assert (output.tokens, output.finish) == ([], FinishReason.STOP)


@pytest.mark.parametrize("config", [
    Qwen3Config(vocab_size=320, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16),
    GPT2Config(vocab_size=320, n_embd=48, n_layer=2, n_head=4, n_positions=128),
], ids=lambda config: config.model_type)  # fmt: skip
def test_embeddings_of_other_model_families(config, prompts, tmp_path):
    model = save_tiny(config, tmp_path)
    with running(tiny_assembly(tmp_path)) as engine:
        assert engine.assembly.limits.embedding == EmbeddingSpec(48)
        for prompt, output in zip(prompts, engine.wait(*map(engine.embed, prompts)), strict=True):
            check(model, prompt, output.hidden)


@sync_and_async
def test_embeddings_batched_with_generation_change_no_token(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        plain = engine.generate(prompts, max_tokens=12)
    with running(tiny_assembly(tiny[0])) as engine:
        keys, embedded = [], []
        for prompt in prompts:
            keys.append(engine.submit(prompt, max_tokens=12))
            embedded.append(engine.embed(prompt[::-1]))
        assert [one.tokens for one in engine.wait(*keys)] == plain
        for prompt, output in zip(prompts, engine.wait(*embedded), strict=True):
            check(tiny[1], prompt[::-1], output.hidden)


@sync_and_async
def test_embeddings_use_and_fill_the_prefix_cache(tiny, prompts):
    (prompt,) = prompts[-1:]
    with running(tiny_assembly(tiny[0])) as engine:
        for _ in range(2):  # the second computes one token, as many as a captured graph does
            (output,) = engine.wait(engine.embed(prompt))
            check(tiny[1], prompt, output.hidden)
        hit = engine.history[-1].stats.cached_tokens
        assert hit >= 36
        engine.generate([prompt], max_tokens=1)
        assert engine.history[-1].stats.cached_tokens > hit


def test_embeddings_do_not_use_captured_graphs(tiny, prompts, monkeypatch):
    capture = CpuCapture(monkeypatch)
    with running(tiny_assembly(tiny[0])) as engine:
        keys = [engine.embed(prompt) for prompt in prompts]
        generated = engine.submit(prompts[1], max_tokens=4)
        for prompt, output in zip(prompts, engine.wait(*keys), strict=True):
            check(tiny[1], prompt, output.hidden)
        engine.wait(generated)
    assert capture.replays


def test_embeddings_with_a_draft_model(tiny, draft, prompts):
    with running(tiny_assembly(tiny[0], num_speculative_tokens=3, speculative_model=str(draft))) as engine:
        engine.submit(prompts[2], max_tokens=20)
        for prompt, output in zip(prompts, engine.wait(*map(engine.embed, prompts)), strict=True):
            check(tiny[1], prompt, output.hidden)


@sync_and_async
def test_an_embedding_waits_for_free_blocks(tiny):
    rnd = random.Random(1)
    prompts = [[rnd.randrange(3, 320) for _ in range(60)] for _ in range(4)]
    with running(tiny_assembly(tiny[0], num_gpu_blocks_override=20)) as engine:
        for prompt, output in zip(prompts, engine.wait(*map(engine.embed, prompts)), strict=True):
            check(tiny[1], prompt, output.hidden)


def test_an_embedding_prompt_may_fill_the_context(tiny):
    prompt = [5] * 255 + [6]
    with running(tiny_assembly(tiny[0])) as engine:
        (output,) = engine.wait(engine.embed(prompt))
        check(tiny[1], prompt, output.hidden)
        with pytest.raises(RequestError, match=r"prompt_tokens=257: must be 1..256 \(max_model_len is 256\)"):
            engine.embed([*prompt, 7])


@sync_and_async
def test_an_aborted_embedding_leaks_nothing(tiny, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        key = engine.embed(prompts[3])
        engine.engine.abort(key)
        engine.generate([prompts[1]], max_tokens=4)
    assert not engine.assembly.scheduler.has_work


def test_hidden_states_are_not_kept_without_embedding_requests(tiny, prompts, monkeypatch):
    with running(tiny_assembly(tiny[0])) as engine:
        monkeypatch.setattr(torch.nn.Module, "register_forward_hook", None)
        assert all(engine.generate(prompts, max_tokens=4))


def test_an_embedding_is_truncated_then_normalized():
    hidden = array("f", [3.0, 4.0, 12.0])
    assert json.loads(EmbeddingCall("x").answer(hidden)) == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert json.loads(EmbeddingCall("x", dimensions=2).answer(hidden)) == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_zero_hidden_state_has_no_embedding(bad):
    with pytest.raises(ValueError, match="no embedding can be made"):
        EmbeddingCall("x").answer(array("f", [bad, 0.0]))


def read(limits=LIMITS, **values):
    return EmbeddingCall.parse(values, limits.input_limits).checked(limits)


def test_accepted_embedding_requests():
    assert read(input="The sea") == EmbeddingCall("The sea")
    assert read(input=[0, 319], pooling_params={}) == EmbeddingCall([0, 319])
    any_size = replace(LIMITS, embedding=EmbeddingSpec(64, range(1, 65)))
    for sent in ([32], 32):  # Triton's OpenAI frontend sends a list
        assert read(any_size, input="x", pooling_params={"dimensions": sent}).dimensions == 32
    assert read(replace(LIMITS, embedding=EmbeddingSpec(64, (8, 16))), input="x",
                pooling_params={"dimensions": [16]}).dimensions == 16  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "embedding_request.input=null: must be a valid Unicode string or a list of token ids, not empty"),
        ({"input": ""}, 'embedding_request.input="": must be'),
        ({"input": []}, r"embedding_request.input=\[\]: must be"),
        ({"input": "\ud800"}, "embedding_request.input=.*valid Unicode"),
        ({"input": 3}, "embedding_request.input=3: must be"),
        ({"input": ["a", "b"]}, r'embedding_request.input\[0\]="a": must be a token id, 0..319; send one prompt'),
        ({"input": [1, True]}, r"embedding_request.input\[1\]=true: must be a token id"),
        ({"input": [1, 320]}, r"embedding_request.input\[1\]=320: must be a token id"),
        ({"input": "x", "model": "y"}, 'embedding_request.model="y": unknown; known are input, pooling_params'),
        ({"input": "x", "pooling_params": []}, r"pooling_params=\[\]: must be a JSON object"),
        ({"input": "x", "pooling_params": {"task": "x"}}, 'pooling_params.task="x": unknown; known are dimensions'),
        ({"input": "x", "pooling_params": {"dimensions": [8]}}, r"dimensions=\[8\]: leave it out: .* its 64"),
    ],
)
def test_rejected_embedding_requests(values, message):
    with pytest.raises(RequestError, match=message):
        read(**values)


@pytest.mark.parametrize("wanted", [0, 65, True, "8", [8, 16], 8.0])
def test_rejected_dimensions(wanted):
    limits = replace(LIMITS, embedding=EmbeddingSpec(64, range(1, 65)))
    with pytest.raises(RequestError, match=r"dimensions=.*must be 1\.\.64"):
        read(limits, input="x", pooling_params={"dimensions": wanted})
    with pytest.raises(RequestError, match="must be one of 8, 16"):
        read(replace(LIMITS, embedding=EmbeddingSpec(64, (8, 16))), input="x", pooling_params={"dimensions": 12})


def test_a_model_without_embeddings_rejects_the_request():
    with pytest.raises(RequestError, match="this model gives no embeddings"):
        read(replace(LIMITS, embedding=None), input="x")


def test_sampling_parameters_of_embedding_requests():
    params = parse_pooling_sampling(
        "embedding_request", {"priority": 3, "cache_salt": "x", "timeout_ms": 5, "top_k": None}, LIMITS
    )
    assert (params.priority, params.cache_salt, params.timeout_ms, params.max_tokens) == (3, "x", 5, 0)
    for name, value in (("max_tokens", 16), ("temperature", 0), ("n", 2)):
        with pytest.raises(RequestError, match=f"{name}={value}: has no effect with embedding_request"):
            parse_pooling_sampling("embedding_request", {name: value}, LIMITS)


def test_dimensions_from_the_model_files(tiny):
    config = tiny[1].config
    assert hidden_size(tiny[1]) == 64
    assert pick_embedding(config, None) is None
    assert pick_embedding(config, 64) == EmbeddingSpec(64)
    matryoshka = type(config)(**config.to_dict() | {"is_matryoshka": True})
    assert pick_embedding(matryoshka, 64) == EmbeddingSpec(64, range(1, 65))
    matryoshka = type(config)(**config.to_dict() | {"matryoshka_dimensions": [8, 16, 128, "32"]})
    assert pick_embedding(matryoshka, 64) == EmbeddingSpec(64, (8, 16))
    for odd in (8, "8", []):
        assert pick_embedding(type(config)(**config.to_dict() | {"matryoshka_dimensions": odd}), 64).dimensions == ()


def test_a_model_without_a_separable_decoder(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny[0])
    model.base_model_prefix = "nothing"
    assert hidden_size(model) is None
