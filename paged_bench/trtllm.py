"""Measure the latency that the models of tensorrtllm_backend add to the engine's own model.

The same requests go to all models of one server. The models of tensorrtllm_backend reach the engine through a local
socket, so that a response passes one more process. Figures are differences of medians of alternating runs. The latency
added to "between responses" is the cost of each token that the duration of a step does not hide.
"""

from __future__ import annotations

import json
import struct
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2

from paged_backend.trtllm.tensors import BLS, ENSEMBLE
from paged_bench._report import Record, Records, added_latency, alternate, arguments, count, parser, publish
from paged_bench._server_load import WORDS, LoadResult
from paged_bench._workload import NULL, model_names, model_options
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
    answers = load.closed_loop(server.grpc_url, model, asks, streams, request)
    return LoadResult.of([one.sent for one in answers], [one.stamps for one in answers], streams * tokens)


def measure(server: TritonServer, streams: int, tokens: int, rounds: int) -> list[Record]:
    loads: dict[str, list[LoadResult]] = {model: [] for model in MODELS}

    def timed(model: str) -> float:
        loads[model].append(run(server, model, streams, tokens))
        return loads[model][-1].tokens / loads[model][-1].seconds

    alternate({f"{model}, {streams} streams, tokens/s": partial(timed, model) for model in MODELS}, rounds)
    figures: dict[str, Callable[[LoadResult], list[float]]] = {
        "time to first response": lambda one: one.first,
        "time between responses": lambda one: one.between,
    }
    times = {
        f"{what} p50, {streams} streams": {model: [of(one) for one in runs] for model, runs in loads.items()}
        for what, of in figures.items()
    }
    return [record for name, found in times.items() for record in added_latency(name, found, MODEL_NAME, TARGET_MS)]


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"rounds": 2, "tokens": 32})
    streams = args.streams or [1, 16]
    options = model_options(args.model) | {"enable_prefix_caching": False, "max_num_seqs": max(16, *streams)}
    records = Records(args)
    with TritonServer(options.pop("model"), options) as server:
        for model in MODELS:
            run(server, model, 1, 8)  # warm up: files and libraries are not cached yet
        for each in streams:
            records += measure(server, each, args.tokens, args.rounds)
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("trtllm", __doc__)
    add = made.add_argument
    shapes = ", ".join([NULL, *model_names()])
    add(
        "--model",
        default="demo",
        help=f"Hugging Face model directory, 'demo', or a shape with random weights: {shapes} (default: demo)",
    )
    add(
        "--streams",
        type=count,
        action="append",
        metavar="N",
        help="number of concurrent streams; may be repeated (default: 1 and 16)",
    )
    add("--tokens", type=count, default=128, metavar="N", help="output tokens of each stream (default: 128)")
    add("--rounds", type=count, default=5, metavar="N", help="number of rounds (default: 5)")
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.5), layout="constrained")
    axes = figure.subplots()
    bars = [one for one in records if one.name.startswith("added to ") and one.value is not None][::-1]
    drawn = axes.barh(
        [one.name.removeprefix("added to ") for one in bars], [one.value for one in bars], color="#76b900"
    )
    axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=7)
    axes.axvline(TARGET_MS, color="#606060", linewidth=0.8)
    axes.set_title("added by the models of tensorrtllm_backend, ms", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0, -0.06, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
