"""Measure the latency that the models of tensorrtllm_backend add to the engine's own model.

The same requests go to all models of one server. The models of tensorrtllm_backend reach the engine through a local
socket, so a response passes one more process. Figures are differences of medians of alternating runs. The latency added
to "between responses" is the cost of each token that the duration of a step does not hide.
"""

from __future__ import annotations

import json
import struct
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tritonclient.grpc import service_pb2

from paged_backend.trtllm.tensors import BLS, ENSEMBLE
from paged_bench._engine import NULL, WORDS, model_options, shape_option
from paged_bench._harness import Bars, Benchmark, Option, Record, alternate, figures, rounds_option
from paged_bench._servers import LoadResult, added_latency
from paged_client import grpc_wire, load
from paged_client.serving.repository import MODEL_NAME
from paged_client.serving.tritonserver import TritonServer
from paged_client.wire import Values

MODELS = (MODEL_NAME, ENSEMBLE, BLS)
TARGET_MS = 1.0
PROMPT = " ".join(WORDS)


@dataclass(frozen=True)
class Ask:
    text: str
    tokens: int


def request(model: str, ask: Ask, request_id: str) -> Any:
    """Return a streaming, greedy request that ignores the end of sequence, with the tensors of the model."""
    if model == MODEL_NAME:
        sampling = {"max_tokens": ask.tokens, "temperature": 0, "ignore_eos": True}
        values: Values = {"text_input": ask.text, "stream": True, "sampling_parameters": json.dumps(sampling)}
        return grpc_wire.infer_request(model, values, request_id)
    made = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    text = ask.text.encode()
    for name, datatype, content in (
        ("text_input", "BYTES", struct.pack("<I", len(text)) + text),
        ("max_tokens", "INT32", struct.pack("<i", ask.tokens)),
        ("end_id", "INT32", struct.pack("<i", -1)),
        ("stream", "BOOL", struct.pack("?", True)),
    ):
        made.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        made.raw_input_contents.append(content)
    return made


def run(server: TritonServer, model: str, streams: int, tokens: int) -> LoadResult:
    asks = [Ask(f"{index} {PROMPT}", tokens) for index in range(streams)]
    return LoadResult.of(load.closed_loop(server.grpc_url, model, asks, streams, request), streams * tokens)


def measure(args: Namespace) -> Iterator[Record]:
    options = model_options(args.model) | {"enable_prefix_caching": False, "max_num_seqs": max(16, *args.streams)}
    with TritonServer(options.pop("model"), options) as server:
        for model in MODELS:
            run(server, model, 1, 8)  # warm up: files and libraries are not cached yet
        for streams in args.streams:
            contestants = {model: partial(run, server, model, streams, args.tokens) for model in MODELS}
            contest = alternate(contestants, args.rounds, LoadResult.rate, label=f"{{}}, {streams} streams, tokens/s")
            yield from added_latency(contest, MODEL_NAME, f"{streams} streams", TARGET_MS)


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    added = figures(records, "added to (.*)")
    yield Bars("added by the models of tensorrtllm_backend, ms", added, line=TARGET_MS)


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        shape_option("demo", NULL),
        Option("--streams", "number of concurrent streams", [1, 16], many=True),
        Option("--tokens", "output tokens of each stream", 128),
        rounds_option(5),
    ),
    quick={"rounds": 2, "tokens": 32},
)
