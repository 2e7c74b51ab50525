"""Tiny models for sequence classification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel, Qwen3Config

from tests.support.in_process import byte_tokenizer

LABELS = {0: "bad", 1: "good", 2: "neutral"}
SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN3 = Qwen3Config(**SIZES, head_dim=16)
# A template that renders a query with a document, as those of vLLM do, and other messages one after the other.
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"


def save_classifier(
    directory: Path, config: PretrainedConfig = QWEN3, *, labels: dict[int, str] = LABELS, **settings: Any
) -> PreTrainedModel:
    """Save a model with random weights, fp32. Return it."""
    config = type(config).from_dict(config.to_dict() | {"id2label": labels, "pad_token_id": 0} | settings)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.eval().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return model


@torch.inference_mode()
def scores_of(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """Return the scores of transformers, [num_labels]."""
    return model.score(model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1])
