"""Generated config.pbtxt files."""

import re
from pathlib import Path

import pytest

from paged_backend.trtllm import configs
from paged_backend.trtllm.tensors import INPUTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("model", INPUTS)
def test_config_pbtxt_matches_the_tensor_tables(model):
    written = (ROOT / "model_repository" / model / "config.pbtxt").read_text()
    assert written == configs.config(model), "run python -m paged_backend.trtllm.configs"
    assert len(re.findall(r"optional: true", written)) == sum(not one.required for one in INPUTS[model].values())
