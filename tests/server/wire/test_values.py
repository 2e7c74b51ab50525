"""Single values out of input tensors."""

import numpy as np
import pytest

from paged_backend.api.errors import RequestError
from paged_backend.api.limits import InputLimits
from paged_backend.server.wire.values import boolean, parse_json, scalar, text


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_of_one_element_may_have_any_shape(shape):
    assert scalar({"top_k": np.full(shape, 5, np.int32)}, "top_k") == 5


def test_a_missing_tensor_is_none_or_the_default():
    assert scalar({}, "top_k") is None and text({}, "text_input") is None
    assert [boolean({}, "stream"), boolean({}, "stream", True)] == [False, True]
    assert boolean({"stream": np.array([False])}, "stream", True) is False


@pytest.mark.parametrize("value", ["é", "é".encode()])
def test_texts_are_strings_or_utf8_bytes(value):
    assert text({"text_input": np.array([value], np.object_)}, "text_input") == "é"


def test_json_is_limited_before_it_is_parsed():
    limits = InputLimits(max_json_chars=3)
    assert parse_json("tools", "[1]", limits) == [1]
    with pytest.raises(RequestError, match=r"tools=.4 characters.: must be at most 3 characters \(max_json_chars\)"):
        parse_json("tools", "[1] ", limits)
    with pytest.raises(RequestError, match="tools: not valid JSON"):
        parse_json("tools", "[1", limits)
