"""Calculate what the network costs when a model is divided over several machines, for each way to divide it.

Nothing is measured. The figures are what the bytes that must cross the network, and the messages that wait for each
other, take with the bandwidth and latency that are given: lower bounds, to which the computation is added.
`paged bench nodes` counts the bytes that the engine moves.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paged_backend.api.sizes import GIB
from paged_bench import _chart
from paged_bench._report import Record, Records, arguments, count, parser, publish, rate
from paged_bench._workload import model_options

BYTES = 2  # of a weight, an activation, and an element of the KV cache


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that the costs depend on."""

    layers: int
    hidden: int
    kv_width: int  # elements of the keys and values of a token in one layer
    vocab: int
    parameters: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Shape:
        """Return the sizes of a model whose layers all have the same attention."""
        text = config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return cls(
            text.num_hidden_layers,
            text.hidden_size,
            2 * text.num_key_value_heads * head_dim,
            text.vocab_size,
            sum(parameter.numel() for parameter in model.parameters()),
        )


@dataclass(frozen=True)
class Cost:
    """What a layout costs the busiest machine. Bytes are those of the direction that has more."""

    weights: float  # bytes in memory
    step: float = 0.0  # bytes of a decode step
    messages: int = 0  # messages of a decode step that wait for each other
    prompt: float = 0.0  # bytes for a prompt


def all_reduced(shape: Shape, rows: int, machines: int) -> float:
    """Return the bytes that a machine sends, and as many that it receives, under tensor parallelism: for the outputs of
    the embeddings, and in each layer of attention and MLP, as an optimal all-reduce moves them (Patarasuk and Yuan:
    Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009)."""
    return 2 * (machines - 1) / machines * rows * shape.hidden * BYTES * (2 * shape.layers + 1)


def layouts(shape: Shape, machines: int, rows: int, prompt: int) -> dict[str, Cost]:
    """Return the cost of each layout. rows: sequences that decode at once. prompt: tokens of a prompt."""
    weights = float(BYTES * shape.parameters)
    logits = (machines - 1) / machines * rows * shape.vocab * BYTES  # those that the first machine needs of the others
    exchanges = math.ceil(math.log2(machines)) * (2 * shape.layers + 1)
    hidden = float(shape.hidden * BYTES)  # a row between two stages
    return {
        "tensor parallel": Cost(
            weights / machines,
            all_reduced(shape, rows, machines) + logits,
            exchanges + 1,
            all_reduced(shape, prompt, machines),
        ),
        "pipeline parallel": Cost(weights / machines, rows * hidden, machines, prompt * hidden),
        "prefill and decode servers": Cost(weights, prompt=float(prompt * shape.layers * shape.kv_width * BYTES)),
        "independent servers": Cost(weights),
    }


def calculate(shape: Shape, args: Namespace) -> list[Record]:
    """Return the records of all layouts."""
    bandwidth = args.gbits * 1e9 / 8
    records = []
    for name, cost in layouts(shape, args.machines, args.rows, args.prompt).items():
        step = cost.step / bandwidth + cost.messages * args.latency_us / 1e6
        records += [
            Record(f"weights of a machine, {name}", cost.weights / GIB, "GiB"),
            Record(f"moved in a decode step, {name}", cost.step / 1e6, "MB"),
            Record(f"network time of a decode step, {name}", 1e3 * step, "ms"),
            Record(f"network time of a prompt, {name}", 1e3 * cost.prompt / bandwidth, "ms"),
        ]
    return records


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {})
    config = AutoConfig.from_pretrained(str(model_options(args.model)["model"]))
    records = Records(args, calculate(Shape.of(config), args))
    title = f"{args.model}, {args.machines} machines, {args.gbits:g} Gbit/s, {args.latency_us:g} µs"
    publish(records, lambda file, _: draw(records, file, title))
    return 0


def _parser() -> ArgumentParser:
    made = parser("layouts", __doc__)
    add = made.add_argument
    add("--model", default="Llama-3.3-70B", help="directory of a model, or a name in paged_bench/models")
    add("--machines", type=count, default=2, metavar="N", help="machines (default: 2)")
    add("--rows", type=count, default=64, metavar="N", help="sequences that decode at once (default: 64)")
    add("--prompt", type=count, default=4096, metavar="N", help="tokens of a prompt (default: 4096)")
    add("--gbits", type=rate, default=100.0, metavar="G", help="Gbit/s of a machine, each direction (default: 100)")
    add("--latency-us", type=rate, default=20.0, metavar="US", help="latency of a message (default: 20)")
    return made


def draw(records: Sequence[Record], file: Path, title: str) -> None:
    figure, axes = _chart.panels(2, 4)
    for each, of in zip(axes, ("decode step", "prompt"), strict=True):
        shown = {
            name: record.value or 0.0 for record in records if (name := _layout(record, f"network time of a {of}"))
        }
        _chart.bars(each, shown, f"network time of a {of}, ms")
    _chart.save(figure, file, title)


def _layout(record: Record, figure: str) -> str:
    """Return the layout that a record of this figure is about; "" for other figures."""
    name, _, layout = record.name.partition(", ")
    return layout if name == figure else ""
