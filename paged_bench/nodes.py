"""Measure a model on several machines: tokens per second, bytes per step, and when a request ends after a link is cut.

By default the machines share each layer (tensor parallelism); with --pipeline-parallel-size they form stages.

The machines are network namespaces of this computer, so they share its cores, and their network has no latency. The
first figure shows what the exchange of data costs, not what several machines gain. Needs root and the program ip.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from paged_backend.api.request import GenerateRequest
from paged_backend.distributed.topology import CLUSTER_SECRET
from paged_backend.engine.assembly import Assembly
from paged_backend.utils.machine import find_python
from paged_bench import _machines
from paged_bench._engine import greedy, load, serve
from paged_bench._harness import (
    Bars,
    Benchmark,
    InvalidArgument,
    Option,
    Record,
    alternate,
    figures,
    model_option,
    not_measured,
    rounds_option,
)
from paged_client.serving.ports import choose_ports
from paged_client.serving.repository import resolve_model

ONE = "one process"
PROMPT = 64  # tokens
LONG_OUTPUT = 4096  # tokens of a request that does not end by itself
END_SECONDS = 10  # target of the time until requests end after a machine is lost


@dataclass(frozen=True)
class Decoded:
    """A run of requests at once."""

    rate: float  # output tokens per second, prefill included
    steps: int  # steps after the prompts were computed
    moved: int  # bytes from and to a machine during these steps


def requests_of(assembly: Assembly, streams: int, output: int) -> list[GenerateRequest]:
    """Return requests with different prompts."""
    vocab = assembly.limits.vocab_size
    prompts = [[(key * 131 + position) % vocab for position in range(PROMPT)] for key in range(streams)]
    return greedy(assembly, prompts, output, ignore_eos=True)


def decode(assembly: Assembly, streams: int, output: int, machine: _machines.Machine) -> Decoded:
    """Run requests at once. machine: the machine whose bytes are counted."""
    requests = requests_of(assembly, streams, output)
    started = time.perf_counter()
    before, steps, tokens = 0, 0, 0
    for step in serve(assembly, requests):
        tokens += sum(len(delta.token_ids) for delta in step.deltas)
        if tokens < 2 * streams:  # prompts are computed
            before, steps = machine.bytes_moved(), 0
        else:
            steps += 1
    return Decoded(streams * output / (time.perf_counter() - started), steps, machine.bytes_moved() - before)


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
    """Return the bytes that machine 1 must send and receive for a decode step of 1 / `stages` of the streams.

    These are: in each layer the sums of the outputs of attention and MLP, and once the sum of the embeddings, as an
    optimal all-reduce moves them; hidden states from and to the neighbouring stages; its part of the logits, which one
    rank needs to sample; and the tokens.
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


def compare(args: Namespace, stages: int) -> Iterator[Record]:
    """Run one process and all machines alternately, then cut a link."""
    nodes, streams = args.nodes, args.streams
    several = f"{nodes} machines" if stages == 1 else f"{nodes} machines in {stages} stages"
    port = choose_ports(http_port=0, grpc_port=0, metrics_port=0)[0]
    options = {"model": resolve_model(args.model), "dtype": "float32", "num_gpu_blocks_override": 1024, "device": "cpu"}
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
        engines = {ONE: load(options), several: load(options | shared)}
        parallel = engines[several]
        stack.callback(parallel.close)
        contestants = {
            name: partial(decode, engine, streams, args.output, machines[0]) for name, engine in engines.items()
        }
        contest = alternate(contestants, args.rounds, lambda run: run.rate)
        required = required_bytes(parallel, streams, nodes, stages)
        seconds = end_after_cut(parallel, machines[0])
    moved = sum(run.moved for run in contest.runs[several]) / sum(run.steps for run in contest.runs[several])
    output = contest.medians[several]
    yield Record(f"output, {streams} streams on {several}", output, "tokens/s", peers={ONE: contest.medians[ONE]})
    yield contest.ratio(f"{several} relative to one process", several, ONE)
    yield Record(f"bytes of one of {several}", moved, "bytes/step", limit=required)
    yield Record(f"bytes that one of {several} must exchange", required, "bytes/step")
    yield Record("end of a request after a link was cut", seconds, "s", target=END_SECONDS)


def measure(args: Namespace) -> Iterator[Record]:
    stages = args.pipeline_parallel_size
    if args.nodes % stages:
        raise InvalidArgument(f"--pipeline-parallel-size {stages}: must divide {args.nodes}, the number of machines")
    if _machines.available():
        yield from compare(args, stages)
    else:
        yield not_measured("output on several machines", _machines.MISSING)


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    output = [record for record in records if record.unit == "tokens/s"]
    alone = {name: value for record in output for name, value in record.peers.items()}
    yield Bars("output tokens/s", alone | figures(output, "output, .* on (.*)"), grey=[ONE])
    moved = next((record for record in records if record.unit == "bytes/step" and record.limit), None)
    exchanged = {"moved": moved.value, "required": moved.limit} if moved else {}
    kilobytes = {name: (nbytes or 0.0) / 1e3 for name, nbytes in exchanged.items()}
    yield Bars("KB of one machine per step", kilobytes, grey=["required"])


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option(help="model to serve"),
        Option("--nodes", "machines (default: 3, which divides the demo model's 9 heads)", 3),
        Option("--pipeline-parallel-size", "stages, of which each has an equal part of the machines", 1),
        Option("--streams", "requests at once", 16),
        Option("--output", "tokens of each", 64),
        rounds_option(5),
    ),
    quick={"rounds": 1, "output": 16},
)
