"""Measure a model on several machines: tokens per second, bytes per step, and when a request ends after a link is cut.

By default the machines share each layer (tensor parallelism); with --pipeline-parallel-size they form stages.

The machines are network namespaces of this computer, so they share its cores, and their network has no latency. The
first figure shows what the exchange of data costs, not what several machines gain. Needs root and the program ip.
"""

from __future__ import annotations

import os
import secrets
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.distributed.topology import CLUSTER_SECRET
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.utils.machine import find_python
from paged_bench import _chart, _machines
from paged_bench._engine import serve
from paged_bench._report import Record, Records, alternate, arguments, count, not_measured, parser, publish, ratio
from paged_client.serving.ports import choose_ports
from paged_client.serving.repository import resolve_model

PROMPT = 64  # tokens
LONG_OUTPUT = 4096  # tokens of a request that does not end by itself
END_SECONDS = 10  # target of the time until requests end after a machine is lost


@dataclass
class Traffic:
    """What moved between the machines during the decode steps of one contestant."""

    steps: int = 0
    bytes: int = 0


def requests_of(assembly: Assembly, streams: int, output: int) -> list[GenerateRequest]:
    """Return requests with different prompts."""
    return [
        GenerateRequest.from_prompt(
            key,
            [(key * 131 + position) % assembly.limits.vocab_size for position in range(PROMPT)],
            SamplingParams(max_tokens=output, temperature=0, ignore_eos=True),
            0,
            frozenset(),
            assembly.limits,
        )
        for key in range(streams)
    ]


def decode(assembly: Assembly, streams: int, output: int, machine: _machines.Machine, traffic: Traffic) -> float:
    """Return output tokens per second of requests that run at once, prefill included."""
    requests = requests_of(assembly, streams, output)
    started = time.perf_counter()
    before, steps, found = 0, 0, 0
    for step in serve(assembly, requests):
        found += sum(len(delta.token_ids) for delta in step.deltas)
        if found < 2 * streams:  # prompts are computed
            before, steps = machine.bytes_moved(), 0
        else:
            steps += 1
    traffic.bytes += machine.bytes_moved() - before
    traffic.steps += steps
    return streams * output / (time.perf_counter() - started)


def end_after_cut(assembly: Assembly, machine: _machines.Machine) -> float:
    """Cut the link of a machine while a request runs. Return the seconds until it has ended with an error."""
    cut = None
    try:
        for _ in serve(assembly, requests_of(assembly, 1, LONG_OUTPUT)):
            if cut is None:
                machine.cut()
                cut = time.perf_counter()
    except RuntimeError:
        if cut is None:
            raise
    assert cut is not None
    return time.perf_counter() - cut


def required_bytes(assembly: Assembly, streams: int, nodes: int, stages: int) -> float:
    """Return the bytes that machine 1 must send and receive for a decode step, in which one of `stages` parts of the
    streams are computed.

    In each layer the sums of the outputs of attention and MLP, and once those of the embeddings, as an optimal
    all-reduce moves them; hidden states from and to the stages beside its own; its part of the logits, which one rank
    needs to sample; and the tokens.
    """
    config = assembly.loaded.model.config.get_text_config()
    size, rows, width = assembly.loaded.spec.dtype.itemsize, -(-streams // stages), nodes // stages
    stage = 1 // width
    states = rows * config.hidden_size * size
    sums = 2 * assembly.shares[1].layers + (stage == 0)
    moved = 4 * (width - 1) / width * sums * states + ((stage > 0) + (stage < stages - 1)) * states
    if stage < stages - 1:
        return moved
    return moved + (rows * config.vocab_size / width * size if width > 1 else 0) + 8 * rows


def measure(model: str, nodes: int, stages: int, streams: int, output: int, rounds: int) -> list[Record]:
    """Run the contestants alternately, and return their records."""
    several = f"{nodes} machines" if stages == 1 else f"{nodes} machines in {stages} stages"
    port = choose_ports(http_port=0, grpc_port=0, metrics_port=0)[0]
    options = {"model": resolve_model(model), "dtype": "float32", "num_gpu_blocks_override": 1024, "device": "cpu"}
    shared = {
        "tensor_parallel_size": nodes // stages,
        "pipeline_parallel_size": stages,
        "nnodes": nodes,
        "master_addr": _machines.server_address(),
        "master_port": port,
    }
    with ExitStack() as stack:
        machines = stack.enter_context(_machines.machines(nodes - 1))
        os.environ.setdefault(CLUSTER_SECRET, secrets.token_hex())
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "MASTER_ADDR": _machines.server_address(),
            "MASTER_PORT": str(port),
        }
        for number, machine in enumerate(machines, 1):
            command = machine.command(find_python(), "-m", "paged_backend.engine.worker_node")
            worker = subprocess.Popen(command, env=environment | {"NODE_RANK": str(number)})
            stack.callback(worker.wait)
            stack.callback(worker.kill)
        alone = assemble(EngineConfig.from_options(options))
        parallel = assemble(EngineConfig.from_options(options | shared))
        stack.callback(parallel.close)
        traffic, none = Traffic(), Traffic()
        figures = alternate(
            {
                "one process": lambda: decode(alone, streams, output, machines[0], none),
                several: lambda: decode(parallel, streams, output, machines[0], traffic),
            },
            rounds,
        )
        required = required_bytes(parallel, streams, nodes, stages)
        seconds = end_after_cut(parallel, machines[0])
    one, many = figures["one process"], figures[several]
    peers = {"one process": statistics.median(one)}
    return [
        Record(f"output, {streams} streams on {several}", statistics.median(many), "tokens/s", peers=peers),
        ratio(f"{several} relative to one process", many, one),
        Record(f"bytes of one of {several}", traffic.bytes / traffic.steps, "bytes/step", limit=required),
        Record(f"bytes that one of {several} must exchange", required, "bytes/step"),
        Record("end of a request after a link was cut", seconds, "s", target=END_SECONDS),
    ]


def main(argv: Sequence[str]) -> int:
    made = _parser()
    args = arguments(made, argv, {"rounds": 1, "output": 16})
    stages = args.pipeline_parallel_size
    if args.nodes % stages:
        made.error(f"--pipeline-parallel-size {stages}: must divide {args.nodes}, the number of machines")
    records = Records(args)
    if _machines.available():
        records += measure(args.model, args.nodes, stages, args.streams, args.output, args.rounds)
    else:
        records.append(not_measured("output on several machines", _machines.MISSING))
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("nodes", __doc__)
    made.add_argument("--model", default="demo", help="model to serve (default: demo)")
    made.add_argument(
        "--nodes",
        type=count,
        default=3,
        metavar="N",
        help="machines (default: 3, which divides the demo model's 9 heads)",
    )
    made.add_argument(
        "--pipeline-parallel-size",
        type=count,
        default=1,
        metavar="N",
        help="stages, of which each has an equal part of the machines (default: 1)",
    )
    made.add_argument("--streams", type=count, default=16, metavar="N", help="requests at once (default: 16)")
    made.add_argument("--output", type=count, default=64, metavar="N", help="tokens of each (default: 64)")
    made.add_argument("--rounds", type=count, default=5, metavar="N", help="rounds (default: 5)")
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    figure, (left, right) = _chart.panels(2, 2)
    for record in records:
        if record.value is None:
            continue
        if record.unit == "tokens/s":
            values = {"one process": record.peers["one process"], "machines": record.value}
            _chart.bars(left, values, "output tokens/s", grey=["one process"])
        elif record.unit == "bytes/step" and record.limit:
            values = {"moved": record.value / 1e3, "required": record.limit / 1e3}
            _chart.bars(right, values, "KB of one machine per step", grey=["required"])
    _chart.save(figure, file, caption)
