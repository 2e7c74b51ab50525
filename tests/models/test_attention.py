"""Tiny random models of many transformers families generate the same tokens with paged attention."""

import random

import pytest

from tests.support.families import FAMILIES
from tests.support.in_process import generate_with_transformers, running, save_tiny, tiny_assembly


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_match_generate(family, tmp_path):
    model = save_tiny(FAMILIES[family](), tmp_path)
    rng = random.Random(family)
    prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in (1, 5, 17, 33, 40)]
    with running(tiny_assembly(tmp_path)) as engine:
        assert engine.generate(prompts, max_tokens=16) == [
            generate_with_transformers(model, prompt, 16) for prompt in prompts
        ]
