"""The limits of the models in front of the engine."""

import pytest

from paged_backend.trtllm.limits import RelayLimits
from paged_backend.trtllm.tensors import BLS


def test_caps_are_config_parameters():
    given = {"interface": BLS, "engine_model_name": "paged_llm", "max_open_rows": "3"}
    assert RelayLimits.from_parameters(given) == RelayLimits(max_open_rows=3)
    for bad in ("0", "x", "", "1.5"):
        with pytest.raises(ValueError, match=f'max_biases="{bad}": must be a whole number 1..'):
            RelayLimits.from_parameters({"max_biases": bad})
