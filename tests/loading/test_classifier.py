"""Models that classify: the head of a model for sequence classification, and the logits of two tokens."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CohereConfig, GPT2Config, LlamaConfig

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.limits import InputLimits
from paged_backend.loading.description import check_config
from paged_backend.server.wire.pooling import ClassificationCall
from tests.support.classifiers import LABELS, QWEN3, SIZES, TEMPLATE, save_classifier, scores_of
from tests.support.in_process import running, save_tiny, tiny_assembly

CONFIGS = [
    QWEN3,
    LlamaConfig(**SIZES, tie_word_embeddings=False),
    GPT2Config(vocab_size=320, n_embd=48, n_layer=2, n_head=4, n_positions=128),
]


@pytest.fixture(scope="module")
def prompts():
    rnd = random.Random(5)
    return [[rnd.randrange(3, 320) for _ in range(length)] for length in (1, 6, 17, 40)]


def answers(engine, prompts):
    """Return the answers to classification requests for these prompts, all in the same steps."""
    call = ClassificationCall.parse({"input": "a"}, InputLimits()).checked(engine.assembly.limits)
    outputs = engine.wait(*map(engine.embed, prompts))
    return [json.loads(call.answer(output.hidden)) for output in outputs]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_probabilities_match_transformers(config, prompts, tmp_path):
    model = save_classifier(tmp_path, config)
    with running(tiny_assembly(tmp_path)) as engine:
        assert engine.assembly.limits.classification.labels == tuple(LABELS.values())
        assert not engine.assembly.limits.generates
        for _ in range(2):  # the second time, the prompts are in the prefix cache
            for prompt, answer in zip(prompts, answers(engine, prompts), strict=True):
                expected = torch.softmax(scores_of(model, prompt), -1)
                torch.testing.assert_close(torch.tensor(answer["probs"]), expected, rtol=1e-4, atol=1e-4)
                assert answer["label"] == LABELS[int(expected.argmax())]


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"problem_type": "single_label_classification"}, "softmax"),
        ({}, "softmax"),
        ({"labels": {0: "score"}}, "sigmoid"),
    ],
)
def test_activation_follows_the_problem_type(settings, activation, tmp_path):
    save_classifier(tmp_path, **settings)
    assert tiny_assembly(tmp_path).limits.classification.activation == activation


def test_sharded_files_have_a_head_too(prompts, tmp_path):
    model = save_classifier(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    (tmp_path / "model.safetensors").unlink()
    with running(tiny_assembly(tmp_path)) as engine:
        (answer,) = answers(engine, prompts[1:2])
    expected = torch.softmax(scores_of(model, prompts[1]), -1)
    assert answer["probs"] == pytest.approx(expected.tolist(), rel=1e-4)


def test_random_weights_include_the_head(tmp_path):
    save_classifier(tmp_path)
    assert tiny_assembly(tmp_path, load_format="dummy").limits.classification.weight.shape == (3, 48)


@pytest.mark.parametrize("kept", [None, (2, 48)], ids=["missing", "two labels"])
def test_a_head_that_does_not_fit_the_configuration_is_refused(tmp_path, kept):
    save_classifier(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = weights.pop("score.weight")
    save_file(weights | ({} if kept is None else {"score.weight": head[: kept[0]].clone()}), file, {"format": "pt"})
    reason = "is missing" if kept is None else r"has the shape \[2, 48\]"
    with pytest.raises(ConfigError, match=rf"score\.weight {reason}; .*config\.json describes one of \[3, 48\]"):
        tiny_assembly(tmp_path)


def test_two_tokens_of_a_generating_model_classify(tiny, prompts):
    with running(tiny_assembly(tiny[0], classifier_from_token=["n", "y"])) as engine:
        assert engine.assembly.limits.generates
        no, yes = engine.assembly.loaded.tokenizer.convert_tokens_to_ids(["n", "y"])
        plain = engine.generate(prompts, max_tokens=4)
        found = answers(engine, prompts)
    for prompt, answer in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = tiny[1](torch.tensor([prompt])).logits[0, -1]
        assert answer["label"] == "y"
        assert answer["probs"] == pytest.approx([torch.softmax(logits[[no, yes]], -1)[1].item()], rel=1e-3, abs=1e-6)
    with running(tiny_assembly(tiny[0])) as engine:
        assert engine.generate(prompts, max_tokens=4) == plain


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (["yes", "n"], r'"yes" is 3 tokens; must be one'),
        (["y"], "must be a list of two different tokens"),
        (["n", "n"], "must be a list of two different tokens"),
        (["", "y"], "must be a list of two different tokens"),
        ("y", "must be a list of two different tokens"),
    ],
)
def test_invalid_tokens_are_refused(tiny, value, reason):
    with pytest.raises(ConfigError, match=rf"classifier_from_token=.*: {reason}"):
        tiny_assembly(tiny[0], classifier_from_token=value)


def test_tokens_of_a_model_with_a_head_are_refused(tmp_path):
    save_classifier(tmp_path)
    with pytest.raises(ConfigError, match=r"classifier_from_token=.* has a head for classification; leave it out"):
        tiny_assembly(tmp_path, classifier_from_token=["n", "y"])


def test_draft_tokens_of_a_model_that_only_classifies_are_refused(tmp_path):
    save_classifier(tmp_path)
    problem = r'num_speculative_tokens=2: \["Qwen3ForSequenceClassification"\] only classifies .*; leave it out'
    with pytest.raises(ConfigError, match=problem):
        tiny_assembly(tmp_path, num_speculative_tokens=2)


def test_a_draft_model_that_only_classifies_is_refused(tiny, tmp_path):
    save_classifier(tmp_path)
    with pytest.raises(ConfigError, match=rf'^speculative_model="{tmp_path}": only classifies'):
        tiny_assembly(tiny[0], speculative_model=str(tmp_path), num_speculative_tokens=2)


def test_a_model_that_scales_its_logits_is_refused(tmp_path):
    save_tiny(CohereConfig(**SIZES, logit_scale=0.3), tmp_path)
    with pytest.raises(ConfigError, match="CohereForCausalLM changes its logits after the output layer"):
        tiny_assembly(tmp_path, classifier_from_token=["n", "y"])


def test_several_ranks_are_refused(tiny):
    options = {"model": str(tiny[0]), "classifier_from_token": ["n", "y"], "tensor_parallel_size": 2}
    config = EngineConfig.from_options(options)
    with pytest.raises(ConfigError, match=r"classifier_from_token=.*: not supported with tensor_parallel_size=2"):
        check_config(config, tiny[0])


def test_chat_template_replaces_the_one_of_the_tokenizer(tiny, tmp_path):
    (tmp_path / "rank.jinja").write_text(TEMPLATE)
    for given in (TEMPLATE, str(tmp_path / "rank.jinja")):
        loaded = tiny_assembly(tiny[0], chat_template=given).loaded
        assert loaded.tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("given", "reason"),
    [("missing.jinja", "neither a template"), ("{% for %}", "is not valid Jinja: line 1")],
)
def test_invalid_chat_templates_are_refused(tiny, given, reason):
    with pytest.raises(ConfigError, match=rf"chat_template.*{reason}"):
        tiny_assembly(tiny[0], chat_template=given)
