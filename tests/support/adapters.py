"""LoRA adapters made and computed by PEFT, and fixtures that generate reference outputs with them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.support.in_process import EngineHarness, generate_with_transformers

LORA = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8}
MAX_TOKENS = 8
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(model: PreTrainedModel, directory: Path, *, seed: int = 0, std: float = 0.3, **options: Any) -> Path:
    """Save an adapter with random weights that are large enough to change the generated tokens."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": PROJECTIONS} | options
    adapted = get_peft_model(deepcopy(model), LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, std, generator=generator)
    adapted.save_pretrained(directory)
    return directory


def generate_with(model: PreTrainedModel, directory: Path, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the tokens that PEFT's model generates greedily for one prompt."""
    return generate_all_with(model, directory, [prompt], max_tokens)[0]


def generate_all_with(
    model: PreTrainedModel, directory: Path, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Return the tokens that PEFT's model generates greedily for each prompt alone."""
    adapted = PeftModel.from_pretrained(deepcopy(model), directory).eval()
    return [generate_with_transformers(adapted, prompt, max_tokens) for prompt in prompts]


def write_adapter_list(directory: Path, adapters: Mapping[str, Path | str]) -> Path:
    """Write multi_lora.json into a directory."""
    file = directory / "multi_lora.json"
    file.write_text(json.dumps({name: str(path) for name, path in adapters.items()}))
    return file


def generate_and_count_hits(
    engine: EngineHarness, prompt: list[int], name: str | None, **sampling: Any
) -> tuple[int, list[int]]:
    """Generate with an adapter. Returns the prompt tokens found in the prefix cache, and the generated tokens."""
    before = engine.history[-1].stats.cached_tokens if engine.history else 0
    tokens = engine.generate([prompt], max_tokens=MAX_TOKENS, lora_name=name, **sampling)[0]
    return engine.history[-1].stats.cached_tokens - before, tokens


@pytest.fixture(scope="module")
def lora_prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in (1, 6, 17, 40)]


@pytest.fixture(scope="module")
def adapter_files(tiny: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters with different ranks, layers and scalings, by name."""
    directory = tmp_path_factory.mktemp("adapters")
    options: dict[str, dict[str, Any]] = {
        "all": {},
        "wide": {"r": 8, "target_modules": "all-linear", "use_rslora": True},
        "attention": {"r": 1, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 3},
        "patterns": {
            "rank_pattern": {"layers.1.self_attn.k_proj": 2, "down_proj": 5},
            "alpha_pattern": {"up_proj": 2, "o_proj": 16},
            "layers_to_transform": [1, 2],
        },
    }
    return {
        name: make_adapter(tiny[1], directory / name, seed=seed, **values)
        for seed, (name, values) in enumerate(options.items())
    }


@pytest.fixture(scope="module")
def lora_outputs(
    tiny: tuple[Path, PreTrainedModel], adapter_files: dict[str, Path], lora_prompts: list[list[int]]
) -> dict[str | None, list[list[int]]]:
    """The tokens that PEFT generates for each prompt with each adapter, and without one (None)."""
    expected: dict[str | None, list[list[int]]] = {
        name: generate_all_with(tiny[1], path, lora_prompts, MAX_TOKENS) for name, path in adapter_files.items()
    }
    expected[None] = [generate_with_transformers(tiny[1], prompt, MAX_TOKENS) for prompt in lora_prompts]
    for index in range(len(lora_prompts)):
        distinct = {tuple(outputs[index]) for outputs in expected.values()}
        assert len(distinct) == len(expected), "an adapter does not change the output"
    return expected


@pytest.fixture
def adapter_list(tmp_path: Path, adapter_files: dict[str, Path]) -> Path:
    """A multi_lora.json with all adapters."""
    return write_adapter_list(tmp_path, adapter_files)
