"""Models with the sizes of popular checkpoints and the outliers of trained ones load in their fastest variant."""

import logging

import pytest
import torch
import transformers as hf

from paged_backend.loading.verification import verify_model
from paged_backend.models.attention import UnsupportedModel
from tests.support.checkpoints import CHECKPOINTS
from tests.support.outliers import add_outliers
from tests.support.pairwise import mostly_nightly

# Models that compute numbers beyond float16 with the outliers of this test: three multiply with tied embeddings.
BEYOND_FLOAT16 = {"Llama-3.2-1B", "Falcon-H1-1.5B", "SmolLM3-3B", "Command-R7B"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.mark.parametrize("dtype", mostly_nightly(DTYPES, default=["bfloat16"]))
@pytest.mark.parametrize("name", mostly_nightly(CHECKPOINTS, default=["Llama-3.2-1B"]))
def test_fastest_variant_passes(name, dtype, caplog):
    caplog.set_level(logging.INFO, "paged_llm")
    torch.manual_seed(0)
    model = add_outliers(hf.AutoModelForCausalLM.from_config(CHECKPOINTS[name](), dtype=DTYPES[dtype])).eval()
    if dtype == "float16" and name in BEYOND_FLOAT16:
        with pytest.raises(UnsupportedModel, match=r"float16 ends at 65,504 .*; use dtype=bfloat16 or dtype=float32"):
            verify_model(model, block_size=16, kv_dtype=DTYPES[dtype])
        return
    verify_model(model, block_size=16, kv_dtype=DTYPES[dtype])
    assert " runs " in caplog.text and "instead of a faster variant" not in caplog.text
