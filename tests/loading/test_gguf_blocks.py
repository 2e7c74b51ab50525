"""GGUF blocks, against the decoder of the gguf package."""

import gguf
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from paged_backend.loading.gguf_blocks import FORMATS, decode

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
HALVES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_rows(name, rows=6, blocks=3):
    """Return random bytes as weights of this format, with finite scales."""
    rng, (size, _) = np.random.default_rng(0), FORMATS[name]
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for start in HALVES[name]:
        data[..., start : start + 2] = rng.standard_normal((rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_gguf_package(name):
    data = random_rows(name)
    expected = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name]))
    found = decode(torch.from_numpy(data), name)
    assert_close(found.dequantize(), expected, rtol=1e-5, atol=1e-5)
    assert int(found.codes.int().abs().max()) <= 2 ** (found.bits - 1)


def test_unknown_formats_are_not_decoded():
    assert decode(torch.zeros(2, 66, dtype=torch.uint8), "IQ2_XXS") is None
