"""The limits of a model, and the rejection of sampling parameters within them."""

import pytest

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.limits import EngineLimits
from paged_backend.api.sampling_params import SamplingParams

LIMITS = EngineLimits(max_model_len=8192, vocab_size=1000, num_pages=256, layout=BlockLayout(16), max_num_seqs=64)


def rejection(**values):
    with pytest.raises(RequestError) as caught:
        SamplingParams.parse(values, LIMITS)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    return str(caught.value)
