"""Tiny sentence encoders with random weights, in the form of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from torch import Tensor
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from tests.support.in_process import byte_tokenizer

CLS, SEP = 257, 258  # token ids at the beginning and end of each text
MODULES = ("Transformer", "Pooling", "Normalize")


def save_encoder(
    directory: Path,
    config: PretrainedConfig,
    pooling: dict[str, Any] | None = None,
    *,
    modules: tuple[str, ...] = MODULES,
    max_seq_length: int | None = None,
) -> PreTrainedModel:
    """Save an encoder, fp32, and a tokenizer of bytes. Return it. pooling: the settings of its pooling; None: the
    directory has no files of sentence-transformers."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(directory)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    assert tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]"]) == [CLS, SEP]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.save_pretrained(directory)
    if pooling is not None:
        listed = [
            {"idx": index, "name": str(index), "path": f"{index}_{name}" if index else "", "type": f"models.{name}"}
            for index, name in enumerate(modules)
        ]
        (directory / "modules.json").write_text(json.dumps(listed))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if max_seq_length:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
    return model


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """Return the last hidden states of transformers, [num_tokens, hidden_size]."""
    return model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
