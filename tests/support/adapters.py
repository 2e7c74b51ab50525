"""LoRA adapters for tests, made and computed by PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.support.in_process import generate_with_transformers

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(model: PreTrainedModel, directory: Path, *, seed: int = 0, std: float = 0.3, **options: Any) -> Path:
    """An adapter of random weights, large enough to change what is generated, as PEFT saves it."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": PROJECTIONS} | options
    adapted = get_peft_model(deepcopy(model), LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, std, generator=generator)
    adapted.save_pretrained(directory)
    return directory


def generate_with(model: PreTrainedModel, directory: Path, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What PEFT's model generates for one prompt, greedily."""
    adapted = PeftModel.from_pretrained(deepcopy(model), directory)
    return generate_with_transformers(adapted.eval(), prompt, max_tokens)


def listing(directory: Path, adapters: Mapping[str, Path | str]) -> Path:
    file = directory / "multi_lora.json"
    file.write_text(json.dumps({name: str(path) for name, path in adapters.items()}))
    return file


LORA = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8}
