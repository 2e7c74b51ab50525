"""Calculate what the network costs when a model is divided over several machines, for each way to divide it.

Nothing is measured. The figures are the times that the bytes over the network, and the messages that wait for each
other, take with the given bandwidth and latency: lower bounds, to which the computation is added. `paged bench nodes`
counts the bytes that the engine moves.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paged_backend.api.sizes import GIB
from paged_bench._engine import model_options
from paged_bench._harness import Bars, Benchmark, Option, Record, figures, model_option

BYTES = 2  # bytes of a weight, an activation, and an element of the KV cache


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
            shell = AutoModelForCausalLM.from_config(config)
        return cls(
            text.num_hidden_layers,
            text.hidden_size,
            2 * text.num_key_value_heads * head_dim,
            text.vocab_size,
            sum(parameter.numel() for parameter in shell.parameters()),
        )


@dataclass(frozen=True)
class Cost:
    """What a layout costs the busiest machine. Bytes are counted in the direction that has more."""

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
    # The logits that the first machine needs from the others.
    logits = (machines - 1) / machines * rows * shape.vocab * BYTES
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


def measure(args: Namespace) -> Iterator[Record]:
    """Calculate the records of all layouts."""
    shape = Shape.of(AutoConfig.from_pretrained(str(model_options(args.model)["model"])))
    bandwidth = args.gbits * 1e9 / 8
    for name, cost in layouts(shape, args.machines, args.rows, args.prompt).items():
        step = cost.step / bandwidth + cost.messages * args.latency_us / 1e6
        yield Record(f"weights of a machine, {name}", cost.weights / GIB, "GiB")
        yield Record(f"moved in a decode step, {name}", cost.step / 1e6, "MB")
        yield Record(f"network time of a decode step, {name}", 1e3 * step, "ms")
        yield Record(f"network time of a prompt, {name}", 1e3 * cost.prompt / bandwidth, "ms")


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    for part in ("decode step", "prompt"):
        yield Bars(f"network time of a {part}, ms", figures(records, f"network time of a {part}, (.*)"))


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option("Llama-3.3-70B", "directory of a model, or a name in paged_bench/models"),
        Option("--machines", "machines", 2),
        Option("--rows", "sequences that decode at once", 64),
        Option("--prompt", "tokens of a prompt", 4096),
        Option("--gbits", "Gbit/s of a machine, each direction", 100.0),
        Option("--latency-us", "latency of a message", 20.0),
    ),
)
