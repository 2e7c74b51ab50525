"""`paged plan`: what fits a GPU or CPU, without loading the weights."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import NamedTuple

from paged_backend.api.sizes import GIB, parse_quantity
from paged_backend.utils.machine import find_python
from paged_client.commands.arguments import parse_pairs
from paged_client.session import UsageError


class Gpu(NamedTuple):
    """A GPU: memory that programs can use in GiB, memory bandwidth in GB/s, and TFLOPS of dense 16-bit matrices."""

    gib: float
    bandwidth: float
    tflops: float


# Memory is the total that CUDA reports, as in PyTorch's errors: less than in the data sheet, by 0.3 GiB more or less
# with the driver and ECC. The rest is from NVIDIA's data sheets (T4, A10, L4, A100, L40S, H100, H200, HGX B200) and
# the whitepaper of the Ada architecture (RTX 4090), without sparsity. A100 and H100 are the SXM versions.
GPUS = {
    "t4": Gpu(14.5, 320, 65),
    "a10": Gpu(22, 600, 125),
    "l4": Gpu(22, 300, 121),
    "rtx4090": Gpu(23.6, 1008, 165),
    "a100-40": Gpu(39.4, 1555, 312),
    "l40s": Gpu(44.4, 864, 362),
    "h100": Gpu(79.1, 3350, 989),
    "a100": Gpu(79.1, 2039, 312),
    "h200": Gpu(139.8, 4800, 989),
    "b200": Gpu(178.3, 8000, 2250),
}
# Without the parts of torch that a plan does not use; the first import decides.
_PROCESS = """
import json, sys
from paged_backend.utils.lean_import import import_transformers
import_transformers()
from paged_backend.engine.sizing import main
sys.exit(main(json.loads(sys.argv[1])))
"""
_RATE = re.compile(r"([\d.]+)\s*([KMGTP]?)(?:B/s|FLOPS)?", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="say what fits a GPU or CPU, without loading a model",
        description="Say how much memory a model takes, how many requests of which length fit, and about how long a"
        " step takes, from the model's configuration and the headers of its files. Without --gpu, the plan is for the"
        " CPU and the free memory of this machine.",
    )
    parser.usage = "paged plan MODEL [--gpu NAME] [--ENGINE-OPTION VALUE ...] [options]"
    add = parser.add_argument
    add("model", help="as for paged serve")
    add("-o", "--option", action="append", default=[], metavar="KEY=VALUE", help="set an engine option")
    add("--gpu", choices=sorted(GPUS), metavar="NAME", help=f"one of {', '.join(GPUS)}")
    add("--memory", type=_size, metavar="SIZE", help="memory of a GPU, or of the machine, such as 80GiB")
    add("--bandwidth", type=_rate, metavar="RATE", help="of its memory, such as 3350GB/s; the times need it")
    add("--flops", type=_rate, metavar="RATE", help="of matrices in the model's data type, such as 989TFLOPS")
    add("--context", type=_count, action="append", default=[], metavar="N", help="length of requests; may be repeated")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=plan)


def plan(args: argparse.Namespace) -> int:
    """Replace this process by the one that plans, which imports torch."""
    from paged_backend.api.errors import ConfigError
    from paged_client.serving.repository import check_options, check_plan, resolve_models

    options: dict[str, object] = {**parse_pairs("-o", args.option), **args.engine_options, "model": args.model}
    gpu = GPUS.get(args.gpu)
    device = {
        "kind": "cpu" if gpu is None else "cuda",
        "memory": args.memory or (int(gpu.gib * GIB) if gpu else 0),
        "bandwidth": args.bandwidth or (gpu and gpu.bandwidth * 1e9),
        "flops": args.flops or (gpu and gpu.tflops * 1e12),
    }
    if args.flops and not device["bandwidth"]:
        raise UsageError("--flops: needs --bandwidth as well")
    try:
        check_options(options)
        check_plan(options, on_cpu=gpu is None)
        resolved = resolve_models(options)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    values = {"options": resolved, "device": device, "contexts": args.context, "json": args.json}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [find_python(), "-c", _PROCESS, json.dumps(values)]
    print("reading the model's layers, which imports PyTorch ...", file=sys.stderr, flush=True)
    os.execve(command[0], command, environment)


def _size(text: str) -> int:
    value = parse_quantity(text, bytes=True)
    if value is None or value < 1:
        raise argparse.ArgumentTypeError(f'{text!r}: must be a size like "80GiB"')
    return int(value)


def _rate(text: str) -> float:
    match = _RATE.fullmatch(text.strip())
    if match is None or not (value := float(match[1]) * _FACTORS[match[2].lower()]):
        raise argparse.ArgumentTypeError(f'{text!r}: must be a rate like "3350GB/s" or "989TFLOPS"')
    return value


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else parse_quantity(text, bytes=False)
    if value is None or value < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of tokens of at least 2")
    return int(value)
