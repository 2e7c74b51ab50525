"""Sentence encoders give the embeddings of transformers, whatever else is in the batch."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.engine.assembly import assemble
from tests.support import real_models
from tests.support.callers import serving
from tests.support.classifiers import SIZES
from tests.support.encoders import CLS, SEP, hidden_states, save_encoder
from tests.support.in_process import byte_tokenizer, running, tiny_assembly

BERT = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"} | {"max_position_embeddings": 40}
NO_HEADS = {name: size for name, size in BERT.items() if name != "num_attention_heads"}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
# Configurations, the settings of their pooling, and what it is.
ENCODERS = {
    "bert": (hf.BertConfig(**BERT), MEAN, lambda states: states.mean(0)),
    "bert, no modules": (hf.BertConfig(**BERT), None, lambda states: states.mean(0)),
    "roberta": (hf.XLMRobertaConfig(**BERT, pad_token_id=1), {"pooling_mode": "cls"}, lambda states: states[0]),
    "mpnet": (hf.MPNetConfig(**BERT), {"pooling_mode_mean_sqrt_len_tokens": True}, lambda s: s.sum(0) / len(s) ** 0.5),
    "distilbert": (
        hf.DistilBertConfig(vocab_size=320, dim=48, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=40),
        {"pooling_mode_max_tokens": True},
        lambda states: states.amax(0),
    ),
    "modernbert": (
        hf.ModernBertConfig(**BERT, pad_token_id=0, local_attention=8),
        {"pooling_mode": "lasttoken"},
        lambda states: states[-1],
    ),
}


def prompts(longest):
    return [[CLS, *(5 + (7 * index + 3 * place) % 200 for place in range(index)), SEP] for index in range(longest - 1)]


def embeddings(engine, given):
    outputs = engine.wait(*[engine.embed(prompt) for prompt in given])
    return torch.tensor([list(output.hidden) for output in outputs])


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_are_those_of_transformers(tmp_path, name):
    """All prompts run together, in several steps."""
    config, pooling, pool = ENCODERS[name]
    model = save_encoder(tmp_path, config, pooling)
    with running(tiny_assembly(tmp_path, max_num_batched_tokens=48)) as engine:
        given = prompts(engine.assembly.limits.max_model_len)
        found = embeddings(engine, given)
        again = embeddings(engine, given[::-1])
        assert engine.assembly.scheduler.stats.cached_tokens == 0
    expected = torch.stack([pool(hidden_states(model, prompt)) for prompt in given])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again.flip(0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "length"),
    [
        ("bert", {}, 40),
        ("roberta", {}, 38),  # positions begin after that of the padding token
        ("bert", {"max_model_len": 24}, 24),
        ("bert", {"max_num_batched_tokens": 30, "max_num_seqs": 8}, 30),
    ],
)
def test_context_length(tmp_path, name, options, length):
    save_encoder(tmp_path, ENCODERS[name][0], MEAN)
    assert tiny_assembly(tmp_path, **{"max_num_batched_tokens": 48} | options).limits.max_model_len == length


def test_context_length_of_sentence_transformers(tmp_path):
    save_encoder(tmp_path, ENCODERS["bert"][0], MEAN, max_seq_length=20)
    assert tiny_assembly(tmp_path, max_num_batched_tokens=48).limits.max_model_len == 20
    longer = tiny_assembly(tmp_path, max_num_batched_tokens=48, max_model_len=32)
    assert longer.limits.max_model_len == 32


def test_a_request_through_the_service(tmp_path):
    """Special tokens are added, a truncated text keeps its first tokens and the end, and text is not generated."""
    model = save_encoder(tmp_path, ENCODERS["bert"][0], MEAN)
    ids = byte_tokenizer().encode("abcdef")
    with serving(tmp_path, max_num_batched_tokens=48) as service:

        def ask(prompt, **sampling):
            inputs = {"embedding_request": json.dumps({"input": prompt}), "sampling_parameters": json.dumps(sampling)}
            (answer,) = service.ask(**inputs)["text_output"]
            return json.loads(answer)

        def expected(prompt):
            mean = hidden_states(model, prompt).mean(0)
            return pytest.approx(torch.nn.functional.normalize(mean, dim=0).tolist(), abs=1e-5)

        assert ask("abcdef") == expected([CLS, *ids, SEP])
        assert ask("abcdef", truncate_prompt_tokens=5) == expected([CLS, *ids[:3], SEP])
        assert ask(ids, truncate_prompt_tokens=5) == expected(ids[:5])
        assert ask("abcdef", truncate_prompt_tokens=5, add_special_tokens=False) == expected(ids[:5])
        refused = service.call(text_input="a").rejection()
        assert "text_input: this model embeds prompts and generates no text; use embedding_request" in refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": True}, 'enable_lora=true: not supported for "bert", which is an encoder; leave it out'),
        ({"quantization": "int8"}, 'quantization="int8": not supported for "bert"'),
        ({"kv_cache_dtype": "int8"}, 'kv_cache_dtype="int8": not supported for "bert"'),
        ({"batch_invariant": True}, 'batch_invariant=true: not supported for "bert"'),
        ({"num_speculative_tokens": 2}, 'num_speculative_tokens=2: not supported for "bert"'),
        ({"tensor_parallel_size": 2}, 'tensor_parallel_size=2: not supported for "bert"'),
        ({"max_model_len": 41}, "max_model_len=41: must be at most 40, the encoder's number of positions"),
        ({"max_model_len": 32}, "max_model_len=32: must be at most max_num_batched_tokens=16"),
    ],
)
def test_options_that_cannot_be_honored_are_rejected(tmp_path, options, message):
    save_encoder(tmp_path, ENCODERS["bert"][0], MEAN)
    with pytest.raises(ConfigError) as raised:
        tiny_assembly(tmp_path, **options)
    assert message in str(raised.value)


BOTH = ("Transformer", "Pooling")
CLS_AND_MEAN, WEIGHTED = {**MEAN, "pooling_mode_cls_token": True}, {"pooling_mode_weightedmean_tokens": True}


@pytest.mark.parametrize(
    ("settings", "modules", "message"),
    [
        (MEAN, (*BOTH, "Dense"), '"Pooling", "Dense"]: must be Transformer, Pooling and perhaps Normalize'),
        (CLS_AND_MEAN, BOTH, 'pooling ["cls", "mean"]: must be one of'),
        (WEIGHTED, BOTH, 'pooling ["weightedmean"]: must be one of'),
        ({}, BOTH, "pooling []: must be one of cls, lasttoken, max, mean"),
    ],
)
def test_other_files_of_sentence_transformers_are_rejected(tmp_path, settings, modules, message):
    save_encoder(tmp_path, ENCODERS["bert"][0], settings, modules=modules)
    with pytest.raises(ConfigError) as raised:
        tiny_assembly(tmp_path)
    assert message in str(raised.value)


OUTSIDE = [{"type": kind, "path": "../x"} for kind in BOTH]


@pytest.mark.parametrize("modules", ["[", "{}", '[{"type": "Pooling"}]', json.dumps(OUTSIDE)])
def test_damaged_files_of_sentence_transformers_are_rejected(tmp_path, modules):
    save_encoder(tmp_path, ENCODERS["bert"][0], MEAN)
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(ConfigError, match=r"modules\.json: "):
        tiny_assembly(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (hf.FNetConfig(**NO_HEADS), "FNetModel cannot be served: "),
        (hf.ConvBertConfig(**BERT), "ConvBertModel cannot be served: beside a longer prompt, an embedding differs by"),
        (hf.BigBirdConfig(**BERT), 'attention_type="block_sparse": not supported; set it to "original_full"'),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_encoders_that_do_not_mask_padding_are_refused(tmp_path, config, message, dtype):
    save_encoder(tmp_path, config)
    with pytest.raises(ConfigError, match=message):
        tiny_assembly(tmp_path, dtype=dtype)


def test_weights_of_heads_are_not_used(tmp_path):
    model = save_encoder(tmp_path, ENCODERS["distilbert"][0], MEAN)
    weights = model.state_dict()
    save_file(weights | {"vocab_projector.bias": torch.zeros(320)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert tiny_assembly(tmp_path).limits.embedding
    save_file({name: weights[name] for name in list(weights)[1:]}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="missing or not in the shape"):
        tiny_assembly(tmp_path)


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 1}, r"max_seq_length=1: must be a number of at least 2"),
        ("sentence_bert_config.json", {"do_lower_case": True}, r"do_lower_case=true: not supported"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean"]}, r"pooling \[\[\"mean\"\]\]: must be one of"),
        ("config.json", {"vocab_size": 200}, r"contains|missing or not in the shape|its tokenizer has the token"),
    ],
)
def test_settings_that_cannot_be_honored_are_rejected(tmp_path, file, settings, message):
    save_encoder(tmp_path, ENCODERS["bert"][0], MEAN)
    path = tmp_path / file
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | settings))
    with pytest.raises(ConfigError, match=message):
        tiny_assembly(tmp_path, max_num_batched_tokens=48)


def test_a_prefix_is_not_added(tmp_path, caplog):
    save_encoder(tmp_path, ENCODERS["bert"][0], MEAN)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": "query"}))
    tiny_assembly(tmp_path, swap_space=0.01)
    assert 'default_prompt_name="query": this prefix is not added to prompts' in caplog.text
    assert "no effect with an encoder: swap_space, num_gpu_blocks_override" in caplog.text


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["minilm", "mpnet"])
def test_real_encoders(name, dtype):
    """32 prompts at once, and the same order of similarities."""
    directory = real_models.ENCODERS[name]()
    tokenizer = hf.AutoTokenizer.from_pretrained(directory)
    model = hf.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    texts = ["A man is eating food.", "Someone eats a meal.", "The stock market fell today."]
    texts += ["The capital of France is Paris. " * count for count in range(1, 30)]
    given = [tokenizer(one)["input_ids"] for one in texts]
    with running(
        assemble(EngineConfig.from_options({"model": str(directory), "dtype": dtype, "device": "cpu"}))
    ) as one:
        found = torch.nn.functional.normalize(embeddings(one, given))
    expected = torch.nn.functional.normalize(torch.stack([hidden_states(model, prompt).mean(0) for prompt in given]))
    least = (found * expected).sum(1).min()
    assert least > (0.99999 if dtype == "float32" else 0.9995), least
    alike, unlike = found[0] @ found[1], found[0] @ found[2]
    assert alike > 0.5 > 0.2 > unlike
