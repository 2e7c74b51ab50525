"""Models that are not decoders of text are rejected by name."""

import re

import pytest
import transformers as hf

from paged_backend.api.errors import ConfigError
from paged_backend.loading.description import check_architecture
from tests.support.classifiers import SIZES
from tests.support.in_process import byte_tokenizer, tiny_assembly

BERT = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
T5 = hf.T5Config(vocab_size=320, d_model=48, d_kv=12, d_ff=64, num_layers=1, num_heads=4)
VIT = hf.ViTConfig(hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=32)
HEAD = "an encoder with a head; only sentence encoders are supported"
MASKED = "predicting masked tokens is not supported"
UNSUPPORTED = [
    (
        hf.BertForSequenceClassification,
        hf.BertConfig(**BERT),
        HEAD,
    ),
    (
        hf.XLMRobertaForSequenceClassification,
        hf.XLMRobertaConfig(**BERT),
        HEAD,
    ),
    (hf.BertForMaskedLM, hf.BertConfig(**BERT), MASKED),
    (
        hf.ModernBertForMaskedLM,
        hf.ModernBertConfig(**BERT, pad_token_id=0),
        MASKED,
    ),
    (hf.BertForPreTraining, hf.BertConfig(**BERT), "the heads of pre-training are not supported"),
    (hf.T5ForConditionalGeneration, T5, "an encoder-decoder model; only decoders and sentence encoders"),
    (hf.Qwen3ForTokenClassification, hf.Qwen3Config(**SIZES, head_dim=16), "token classification is not supported"),
    (hf.Qwen3ForQuestionAnswering, hf.Qwen3Config(**SIZES, head_dim=16), "question answering is not supported"),
    (hf.ViTForImageClassification, VIT, "transformers has no decoder of text for this type"),
]


@pytest.mark.parametrize(("kind", "config", "reason"), UNSUPPORTED, ids=lambda value: getattr(value, "__name__", ""))
def test_other_models_are_rejected_by_name(tmp_path, kind, config, reason):
    kind(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    file = re.escape(str(tmp_path / "config.json"))
    names = rf'architectures=\["{kind.__name__}"\], model_type="{config.model_type}"'
    with pytest.raises(ConfigError, match=f"^{file}: {names}: {reason}"):
        tiny_assembly(tmp_path)


def test_a_bert_that_is_a_decoder_is_not_called_an_encoder(tmp_path):
    hf_config = hf.BertConfig(**BERT, is_decoder=True, architectures=["BertLMHeadModel"])
    check_architecture(tmp_path, hf_config)


def test_names_of_classes_must_be_a_list(tmp_path):
    with pytest.raises(ConfigError, match=r"architectures=7, .*: architectures must be a list of names"):
        check_architecture(tmp_path, hf.LlamaConfig(architectures=7))
