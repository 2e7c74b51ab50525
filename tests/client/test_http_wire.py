"""Requests and responses of the HTTP endpoints."""

import pytest

from paged_client import PagedError, http_wire

EVENTS = 'data: {"a": 1}\n\ndata: {"b": "é"}\n\n'.encode()


@pytest.mark.parametrize(
    ("status", "body", "code", "message"),
    [
        (400, b'{"error":"INVALID_ARGUMENT: no"}', "INVALID_ARGUMENT", "no"),
        (400, b'data: {"error":"CANCELLED: no"}\n\n', "CANCELLED", "no"),
        (400, b'{"error":"no class"}', "UNKNOWN", "no class"),
        (404, b'{"error":"no model"}', "NOT_FOUND", "no model"),
        (503, b"<html>busy</html>", "UNAVAILABLE", "HTTP 503 why <html>busy</html>"),
        (500, b"", "UNKNOWN", "HTTP 500 why"),
        (400, b'["no object"]', "UNKNOWN", 'HTTP 400 why ["no object"]'),
    ],
)
def test_http_replies(status, body, code, message):
    error = http_wire.http_error(status, "why", body)
    assert (error.code, error.message) == (code, message)


@pytest.mark.parametrize("cut", range(len(EVENTS) + 1))
def test_event_stream_may_be_split_anywhere(cut):
    parser = http_wire.EventParser()
    assert parser.feed(EVENTS[:cut]) + parser.feed(EVENTS[cut:]) == ['{"a": 1}', '{"b": "é"}']


def test_line_endings_comments_and_other_fields():
    parser = http_wire.EventParser()
    assert parser.feed(b": hi\r\nevent: x\r\ndata:1\r\ndata: 2\r\n\r\n\r\n\n") == ["1\n2"]


def test_incomplete_event_is_not_returned():
    assert http_wire.EventParser().feed(b"data: 1\n") == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("http://host", "http://host"),
        ("https://[::1]", "https://[::1]"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("https://host/prefix", "https://host/prefix"),
    ],
)
def test_http_urls(url, expected):
    assert http_wire.generate_url(url, "a b/c") == f"{expected}/v2/models/a%20b%2Fc/generate_stream"


@pytest.mark.parametrize(
    "data",
    [
        '{"text_output":"a","num_output_tokens":2,"model_name":"m"}',
        '{"text_output":["a"],"num_output_tokens":[2]}',
    ],
)
def test_fields_of_an_event(data):
    assert http_wire.read_fields(data) == {"text_output": ["a"], "num_output_tokens": [2]}


@pytest.mark.parametrize("data", ["", "[]", '{"text'])
def test_event_that_is_not_an_object_is_an_internal_error(data):
    with pytest.raises(PagedError) as raised:
        http_wire.read_fields(data)
    assert raised.value.code == "INTERNAL"
