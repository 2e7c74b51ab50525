"""Seeded generator of invalid requests: HTTP bodies and gRPC messages."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from tritonclient.grpc import service_pb2

from paged_backend.api.sampling_params import SamplingParams
from paged_backend.server.wire.tensors import INPUTS

GOOD = {"text_input": "abcd", "max_tokens": 2, "temperature": 0}
PARAMETERS = sorted(spec.name for spec in fields(SamplingParams))
SURROGATE = "\ud800"  # an unpaired surrogate, which UTF-8 cannot encode
DEEP = 2000  # nested brackets; 200,000 crash tritonserver 2.51 before a model sees the request


class RawJson(NamedTuple):
    """Text that is inserted verbatim, valid JSON or not."""

    text: str


class Body(NamedTuple):
    """A POST to one of the generate endpoints."""

    endpoint: str
    data: bytes


class Message(NamedTuple):
    """A message of a gRPC stream."""

    request: service_pb2.ModelInferRequest


def _nested(rng: random.Random) -> RawJson:
    depth, (begin, end) = rng.choice([3, 30, DEEP]), rng.choice([("[", "]"), ('{"a":', "}")])
    return RawJson(begin * depth + rng.choice(["1", '"x"', "[]"]) + end * depth)


VALUES: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice([True, False]),
    lambda rng: rng.choice([-1, 0, 2**31, 2**63 - 1, -(2**63), 2**64, 10**30, 10 ** rng.randrange(5000)]),
    lambda rng: rng.choice([-0.5, 1.5, 1e308, -1e308, 5e-324]),
    lambda rng: RawJson(rng.choice(["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "01", "+1", "0x1", "nul"])),
    lambda rng: rng.choice(["", " ", "x", "1e5", "nan", "inf", "-inf", SURROGATE, "\0", "é" * 300, "a" * 10_000]),
    lambda rng: rng.choice(
        [[], [[]], [None], [1, "a"], [SURROGATE], ["a"] * 2000, [-1], [320], [2**31], [1.5], [True]]
    ),
    lambda rng: rng.choice([{}, {"a": 1}, {"1": "a"}, {"-1": 1}, {"320": 1}, {"1": 101}, {SURROGATE: 1}, {"": {}}]),
    lambda rng: {str(rng.randrange(10**6)): rng.random() for _ in range(rng.choice([3, 3000]))},
    _nested,
]
REGEXES = ("(", "[a", "(?<=a)b", r"\1", "(a" * 500, "(?P<x", "a**", r"\p{Nope}", "\0(", "[z-a]", SURROGATE)
GRAMMARS = ("", "start", "start: ", "start: nope", 'start: "a', "start: start", "%%", 'start: "a"{9,1}', "a: b\nb: a")
SCHEMAS: tuple[Any, ...] = (
    {"type": "nope"}, {"type": 3}, {"$ref": "#/nope"}, {"$ref": "http://localhost/x"}, {"pattern": "("},
    {"minimum": 3, "maximum": 1, "type": "integer"}, {"enum": []}, [], 1, "{", {"properties": 3},
    {"allOf": [{"type": "string"}, {"type": "null"}]}, 
)  # fmt: skip
TURNS: tuple[Any, ...] = (
    [], {}, 1, None, "hi", [1], [[]], [{}], [{"role": "user"}], [{"content": "a"}], [{"role": 1, "content": "a"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "image_url"}]}], "[{", "[1e999",
    [{"role": "user", "content": "a", "tool_calls": 3}], [{"role": "user", "content": SURROGATE}],
)  # fmt: skip
EMBEDDINGS: tuple[Any, ...] = (
    {}, [], 1, {"input": ""}, {"input": []}, {"input": [[1]]}, {"input": [-1]}, {"input": [1.5]}, {"input": [10**30]},
    {"input": "a", "pooling_params": 1}, {"input": "a", "pooling_params": {"dimensions": "x"}}, {"input": "a", "x": 1},
)  # fmt: skip


def random_value(rng: random.Random) -> Any:
    """Return a value of any JSON type, often invalid for any parameter."""
    return rng.choice(VALUES)(rng)


def to_json(value: Any) -> str:
    """Encode a value as JSON, which RawJson and very large integers may make invalid."""
    if isinstance(value, RawJson):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {to_json(item)}" for name, item in value.items()) + "}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:#x}".replace("0x", "") if abs(value) >= 10**4000 else str(value)  # hex: an invalid number
    return json.dumps(value)


def _sampling(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(PARAMETERS): random_value(rng) for _ in range(rng.choice([1, 1, 2, 5]))}


def _structure(rng: random.Random) -> dict[str, Any]:
    name, values = rng.choice([("regex", REGEXES), ("grammar", GRAMMARS), ("json_schema", SCHEMAS), ("choice", TURNS)])
    return {name: rng.choice(values)}


def _unknown(rng: random.Random) -> dict[str, Any]:
    name = rng.choice([rng.choice(PARAMETERS), rng.choice(sorted(INPUTS)), "x" * rng.choice([1, 300]), SURROGATE, ""])
    return {rng.choice([name + "s", name.upper(), name[::-1], f" {name}"]): random_value(rng)}


def _tensor(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(sorted(INPUTS)): random_value(rng)}


def _ids(rng: random.Random) -> dict[str, Any]:
    return {"text_input": None, "input_ids": [rng.choice([1, -1, 320, 2**31 - 1, -(2**31), 2**31, 1.5, "1"])] * 3}


def _conversation(rng: random.Random) -> dict[str, Any]:
    turns = rng.choice(TURNS)
    inputs = {"text_input": None, "messages": turns if isinstance(turns, str) else json.dumps(turns)}
    if rng.random() < 0.3:
        inputs["tools"] = json.dumps(rng.choice(TURNS))
    if rng.random() < 0.1:
        inputs["chat_template_kwargs"] = json.dumps(rng.choice(TURNS))
    return inputs


def _embedding(rng: random.Random) -> dict[str, Any]:
    return {**dict.fromkeys(GOOD), "embedding_request": json.dumps(rng.choice(EMBEDDINGS))}


def _request_field(rng: random.Random) -> dict[str, Any]:
    """Change a field of the request that is not a tensor."""
    name = rng.choice(["id", "timeout", "sequence_id", "sequence_start", "sequence_end", "priority"])
    return {name: random_value(rng)}


CHANGES = [
    _sampling,
    _sampling,
    _sampling,
    _structure,
    _unknown,
    _tensor,
    _ids,
    _conversation,
    _embedding,
    _request_field,
]


def _invalid_request(rng: random.Random) -> dict[str, Any]:
    """Return a request that is almost certainly invalid. Fields whose value is None are omitted."""
    change = rng.choice(CHANGES)(rng)
    if rng.random() < 0.5 and not change.keys() & {"text_input", "id", "timeout"}:
        change = {"sampling_parameters": to_json(change)}
    return {name: item for name, item in (GOOD | change).items() if item is not None}


def _corrupted(rng: random.Random, data: bytes) -> bytes:
    """Change, remove or repeat some bytes."""
    for _ in range(rng.choice([1, 1, 2, 8])):
        start, count = rng.randrange(len(data) + 1), rng.choice([1, 1, 3, 20])
        odd = rng.choice([b'"', b"{", b"]", b"\xff"])
        new = rng.choice([b"", rng.randbytes(count), data[start : start + count] * 2, odd])
        data = data[:start] + new + data[start + rng.choice([0, len(new), count]) :]
    return data


def body(rng: random.Random) -> Body:
    """Return an invalid HTTP request."""
    data = to_json(_invalid_request(rng)).encode(errors="replace")
    if rng.random() < 0.2:
        data = _corrupted(rng, data)
    return Body(rng.choice(["generate", "generate_stream"]), data)


DATA_TYPES = ("BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP16", "FP32", "FP64", "BYTES", "BF16", "", "NOPE")
SHAPES: tuple[tuple[int, ...], ...] = ((1,), (0,), (2,), (3,), (1, 1), (), (-1,), (2**31,), (2**62,), (1,) * 20)


def _bytes(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def _content(rng: random.Random, value: Any) -> bytes:
    """Return the raw contents of a tensor, malformed with some probability."""
    text = value if isinstance(value, str) else to_json(value)
    return rng.choice([
        lambda: _bytes(text.encode(errors="replace")),
        lambda: _bytes(text.encode(errors="surrogatepass")),
        lambda: _bytes(b"\xff\xfe" + rng.randbytes(5)),
        lambda: struct.pack("<I", rng.choice([0, 7, 2**31, 2**32 - 1])) + b"abc",
        lambda: rng.randbytes(rng.choice([0, 1, 4, 8, 12])),
        lambda: struct.pack("<i", rng.choice([-1, 320, 2**31 - 1])),
    ])()  # fmt: skip


def message(rng: random.Random, model: str) -> Message:
    """Return an invalid gRPC request."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    inputs: dict[str, Any] = {"text_input": "abcd"}
    change = rng.choice(CHANGES)(rng)
    known = {name: item for name, item in change.items() if name in INPUTS or rng.random() < 0.2}
    inputs |= known
    if rest := {name: item for name, item in change.items() if name not in known}:
        inputs.setdefault("sampling_parameters", to_json({"max_tokens": 2} | rest))
    for name, value in inputs.items():
        if value is None:
            continue
        spec = INPUTS.get(name)
        kind = spec.data_type.removeprefix("TYPE_").replace("STRING", "BYTES") if spec else "BYTES"
        malformed = rng.random() < 0.3
        shape = rng.choice(SHAPES) if malformed and rng.random() < 0.5 else (1,)
        tensor = request.inputs.add(name=name.encode(errors="replace").decode(), shape=shape)
        tensor.datatype = rng.choice(DATA_TYPES) if malformed and rng.random() < 0.5 else kind
        text = value if isinstance(value, str) else to_json(value)
        valid = _bytes(text.encode(errors="replace")) if kind == "BYTES" else bytes({"INT32": 4}.get(kind, 1))
        request.raw_input_contents.append(_content(rng, value) if malformed else valid)
    if rng.random() < 0.05:
        request.model_name, request.model_version = rng.choice([("nope", ""), (model, "9"), (model, "x"), ("", "")])
    if rng.random() < 0.05:
        request.outputs.add(name=rng.choice(["nope", "text_output", ""]))
    if rng.random() < 0.05:
        request.raw_input_contents.append(b"abc")
    if rng.random() < 0.05:
        request.id = rng.choice(["x" * 300, "é" * 200, "\0"])
    if rng.random() < 0.1:
        _odd_parameter(rng, request)
    return Message(request)


def _odd_parameter(rng: random.Random, request: service_pb2.ModelInferRequest) -> None:
    parameter = request.parameters[rng.choice(["timeout", "priority", "sequence_id", "sequence_end", "nope", "top_p"])]
    kind = rng.choice(["string_param", "int64_param", "bool_param", "double_param"])
    given = {"string_param": "x", "int64_param": -1, "bool_param": True, "double_param": float("nan")}
    setattr(parameter, kind, given[kind])
