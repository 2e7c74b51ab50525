"""Single values out of input tensors."""

import numpy as np
import pytest

from paged_backend.api.errors import RequestError
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


@pytest.mark.parametrize("json", ["[1", "[" * 100_000])
def test_invalid_json_is_rejected(json):
    assert parse_json("tools", "[1]") == [1]
    with pytest.raises(RequestError, match="tools: not valid JSON"):
        parse_json("tools", json)


def test_a_key_that_is_there_twice_is_rejected():
    assert parse_json("tools", '[{"a": {"b": 1}}, {"a": 1}]') == [{"a": {"b": 1}}, {"a": 1}]
    with pytest.raises(RequestError, match='tools: not valid JSON: the key "b" is there twice'):
        parse_json("tools", '[{"a": {"b": 1, "b": 1}}]')


def test_a_duplicate_behind_many_keys_is_found():
    """In linear time: a quadratic search takes more than an hour here, on the thread that admits requests."""
    keys = ", ".join(f'"{number}": 0' for number in range(500_000))
    with pytest.raises(RequestError, match='the key "x" is there twice'):
        parse_json("tools", f'{{{keys}, "x": 1, "x": 2}}')
