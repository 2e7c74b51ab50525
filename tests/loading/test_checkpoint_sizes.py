"""Models with the sizes of popular checkpoints and the outliers of trained ones load in their fastest variant."""

import logging

import pytest
import torch
import transformers as hf

from paged_backend.loading.verification import verify_model
from paged_backend.models.attention import UnsupportedModel
from paged_kernels.cpu import native
from tests.support.checkpoints import CHECKPOINTS
from tests.support.outliers import add_outliers
from tests.support.pairwise import mostly_nightly

# Models that compute numbers beyond float16 with the outliers of this test: three multiply with tied embeddings.
BEYOND_FLOAT16 = {"Llama-3.2-1B", "Falcon-H1-1.5B", "SmolLM3-3B", "Command-R7B"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load(name, dtype):
    torch.manual_seed(0)
    model = add_outliers(hf.AutoModelForCausalLM.from_config(CHECKPOINTS[name](), dtype=DTYPES[dtype])).eval()
    verify_model(model, block_size=16, kv_dtype=DTYPES[dtype])


def is_fastest(log):
    return " runs " in log.text and "instead of a faster variant" not in log.text


@pytest.mark.parametrize("dtype", mostly_nightly(DTYPES, default=["bfloat16"]))
@pytest.mark.parametrize("name", mostly_nightly(CHECKPOINTS, default=["Llama-3.2-1B"]))
def test_fastest_variant_passes(name, dtype, caplog):
    caplog.set_level(logging.INFO, "paged_llm")
    if dtype == "float16" and name in BEYOND_FLOAT16:
        with pytest.raises(UnsupportedModel, match=r"float16 ends at 65,504 .*; use dtype=bfloat16 or dtype=float32"):
            load(name, dtype)
        return
    load(name, dtype)
    assert is_fastest(caplog)


@pytest.mark.nightly
@pytest.mark.parametrize("level", native.supported()[1:])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_fastest_variant_passes_on_every_level(name, level, caplog, monkeypatch):
    """The best level of the machine is that of the other test."""
    native.compile_on_demand()
    monkeypatch.setenv(native.LEVEL, level)
    native._index.cache_clear()
    caplog.set_level(logging.INFO, "paged_llm")
    try:
        load(name, "bfloat16")
    finally:
        native._index.cache_clear()
    assert is_fastest(caplog)
