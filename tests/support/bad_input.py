"""Requests that make no sense, made up from a seed: over HTTP as bodies, over gRPC as messages of the protocol."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from tritonclient.grpc import service_pb2

from paged_backend.api.sampling_params import SamplingParams
from paged_backend.server.tensors import INPUTS

GOOD = {"text_input": "abcd", "max_tokens": 2, "temperature": 0}
PARAMETERS = sorted(spec.name for spec in fields(SamplingParams))
HALF = "\ud800"  # of a character
DEEP = 2000  # brackets in brackets; 200,000 end a tritonserver of 2.51 before any of them reaches a model


class RawJson(NamedTuple):
    """A value that is written as it is, be it JSON or not."""

    text: str


class Body(NamedTuple):
    """Of a POST to one of the generate endpoints."""

    endpoint: str
    data: bytes


class Message(NamedTuple):
    """Of a gRPC stream."""

    request: service_pb2.ModelInferRequest


def _nested(rng: random.Random) -> RawJson:
    depth, (begin, end) = rng.choice([3, 30, DEEP]), rng.choice([("[", "]"), ('{"a":', "}")])
    return RawJson(begin * depth + rng.choice(["1", '"x"', "[]"]) + end * depth)


VALUES: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice([True, False]),
    lambda rng: rng.choice([-1, 0, 2**31, 2**63 - 1, -(2**63), 2**64, 10**30, 10 ** rng.randrange(5000)]),
    lambda rng: rng.choice([-0.5, 1.5, 1e308, -1e308, 5e-324]),
    lambda rng: RawJson(rng.choice(["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "01", "+1", "0x1", "nul"])),
    lambda rng: rng.choice(["", " ", "x", "1e5", "nan", "inf", "-inf", HALF, "\0", "é" * 300, "a" * 10_000]),
    lambda rng: rng.choice([[], [[]], [None], [1, "a"], [HALF], ["a"] * 2000, [-1], [320], [2**31], [1.5], [True]]),
    lambda rng: rng.choice([{}, {"a": 1}, {"1": "a"}, {"-1": 1}, {"320": 1}, {"1": 101}, {HALF: 1}, {"": {}}]),
    lambda rng: {str(rng.randrange(10**6)): rng.random() for _ in range(rng.choice([3, 3000]))},
    _nested,
]
REGEXES = ("(", "[a", "(?<=a)b", r"\1", "(a" * 500, "(?P<x", "a**", r"\p{Nope}", "\0(", "[z-a]", HALF)
GRAMMARS = ("", "start", "start: ", "start: nope", 'start: "a', "start: start", "%%", 'start: "a"{9,1}', "a: b\nb: a")
SCHEMAS: tuple[Any, ...] = (
    {"type": "nope"}, {"type": 3}, {"$ref": "#/nope"}, {"$ref": "http://localhost/x"}, {"pattern": "("},
    {"minimum": 3, "maximum": 1, "type": "integer"}, {"enum": []}, [], 1, "{", {"properties": 3},
    {"allOf": [{"type": "string"}, {"type": "null"}]}, 
)  # fmt: skip
TURNS: tuple[Any, ...] = (
    [], {}, 1, None, "hi", [1], [[]], [{}], [{"role": "user"}], [{"content": "a"}], [{"role": 1, "content": "a"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "image_url"}]}], "[{", "[1e999",
    [{"role": "user", "content": "a", "tool_calls": 3}], [{"role": "user", "content": HALF}],
)  # fmt: skip
EMBEDDINGS: tuple[Any, ...] = (
    {}, [], 1, {"input": ""}, {"input": []}, {"input": [[1]]}, {"input": [-1]}, {"input": [1.5]}, {"input": [10**30]},
    {"input": "a", "pooling_params": 1}, {"input": "a", "pooling_params": {"dimensions": "x"}}, {"input": "a", "x": 1},
)  # fmt: skip


def value(rng: random.Random) -> Any:
    return rng.choice(VALUES)(rng)


def spelled(found: Any) -> str:
    """As JSON, or nearly."""
    if isinstance(found, RawJson):
        return found.text
    if isinstance(found, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {spelled(one)}" for name, one in found.items()) + "}"
    if isinstance(found, int) and not isinstance(found, bool):
        return f"{found:#x}".replace("0x", "") if abs(found) >= 10**4000 else str(found)  # hex digits: no number then
    return json.dumps(found)


def _sampling(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(PARAMETERS): value(rng) for _ in range(rng.choice([1, 1, 2, 5]))}


def _structure(rng: random.Random) -> dict[str, Any]:
    name, values = rng.choice([("regex", REGEXES), ("grammar", GRAMMARS), ("json_schema", SCHEMAS), ("choice", TURNS)])
    return {name: rng.choice(values)}


def _unknown(rng: random.Random) -> dict[str, Any]:
    name = rng.choice([rng.choice(PARAMETERS), rng.choice(sorted(INPUTS)), "x" * rng.choice([1, 300]), HALF, ""])
    return {rng.choice([name + "s", name.upper(), name[::-1], f" {name}"]): value(rng)}


def _tensor(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(sorted(INPUTS)): value(rng)}


def _ids(rng: random.Random) -> dict[str, Any]:
    return {"text_input": None, "input_ids": [rng.choice([1, -1, 320, 2**31 - 1, -(2**31), 2**31, 1.5, "1"])] * 3}


def _conversation(rng: random.Random) -> dict[str, Any]:
    turns = rng.choice(TURNS)
    found = {"text_input": None, "messages": turns if isinstance(turns, str) else json.dumps(turns)}
    if rng.random() < 0.3:
        found["tools"] = json.dumps(rng.choice(TURNS))
    return found


def _embedding(rng: random.Random) -> dict[str, Any]:
    return {**dict.fromkeys(GOOD), "embedding_request": json.dumps(rng.choice(EMBEDDINGS))}


def _own(rng: random.Random) -> dict[str, Any]:
    """What steers a request beside its tensors."""
    name = rng.choice(["id", "timeout", "sequence_id", "sequence_start", "sequence_end", "priority"])
    return {name: value(rng)}


CHANGES = [_sampling, _sampling, _sampling, _structure, _unknown, _tensor, _ids, _conversation, _embedding, _own]


def _changed(rng: random.Random) -> dict[str, Any]:
    """A request that something is wrong with, or most likely is. A name whose value is None is left out."""
    change = rng.choice(CHANGES)(rng)
    if rng.random() < 0.5 and not change.keys() & {"text_input", "id", "timeout"}:
        change = {"sampling_parameters": spelled(change)}
    return {name: one for name, one in (GOOD | change).items() if one is not None}


def _spoilt(rng: random.Random, data: bytes) -> bytes:
    """With some of its bytes changed, left out or repeated."""
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, count = rng.randrange(len(data) + 1), rng.choice([1, 1, 3, 20])
        odd = rng.choice([b'"', b"{", b"]", b"\xff"])
        new = rng.choice([b"", rng.randbytes(count), data[at : at + count] * 2, odd])
        data = data[:at] + new + data[at + rng.choice([0, len(new), count]) :]
    return data


def body(rng: random.Random) -> Body:
    data = spelled(_changed(rng)).encode(errors="replace")
    if rng.random() < 0.2:
        data = _spoilt(rng, data)
    return Body(rng.choice(["generate", "generate_stream"]), data)


DATA_TYPES = ("BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP16", "FP32", "FP64", "BYTES", "BF16", "", "NOPE")
SHAPES: tuple[tuple[int, ...], ...] = ((1,), (0,), (2,), (3,), (1, 1), (), (-1,), (2**31,), (2**62,), (1,) * 20)


def _bytes(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def _content(rng: random.Random, name: str, wanted: Any) -> bytes:
    text = wanted if isinstance(wanted, str) else spelled(wanted)
    return rng.choice([
        lambda: _bytes(text.encode(errors="replace")),
        lambda: _bytes(text.encode(errors="surrogatepass")),
        lambda: _bytes(b"\xff\xfe" + rng.randbytes(5)),
        lambda: struct.pack("<I", rng.choice([0, 7, 2**31, 2**32 - 1])) + b"abc",
        lambda: rng.randbytes(rng.choice([0, 1, 4, 8, 12])),
        lambda: struct.pack("<i", rng.choice([-1, 320, 2**31 - 1])),
    ])()  # fmt: skip


def message(rng: random.Random, model: str) -> Message:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    inputs: dict[str, Any] = {"text_input": "abcd"}
    change = rng.choice(CHANGES)(rng)
    known = {name: one for name, one in change.items() if name in INPUTS or rng.random() < 0.2}
    inputs |= known
    if rest := {name: one for name, one in change.items() if name not in known}:
        inputs.setdefault("sampling_parameters", spelled({"max_tokens": 2} | rest))
    for name, wanted in inputs.items():
        if wanted is None:
            continue
        spec = INPUTS.get(name)
        kind = spec.data_type.removeprefix("TYPE_").replace("STRING", "BYTES") if spec else "BYTES"
        odd = rng.random() < 0.3
        shape = rng.choice(SHAPES) if odd and rng.random() < 0.5 else (1,)
        tensor = request.inputs.add(name=name.encode(errors="replace").decode(), shape=shape)
        tensor.datatype = rng.choice(DATA_TYPES) if odd and rng.random() < 0.5 else kind
        text = wanted if isinstance(wanted, str) else spelled(wanted)
        sound = _bytes(text.encode(errors="replace")) if kind == "BYTES" else bytes({"INT32": 4}.get(kind, 1))
        request.raw_input_contents.append(_content(rng, name, wanted) if odd else sound)
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
