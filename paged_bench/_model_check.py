"""Check a real model: its tokens in float32 against transformers, and an answer in bfloat16, also of a server.

    python -m paged_bench._model_check [--model DIR] [--json FILE]

On a GPU it covers what random weights cannot: CUDA graphs, preemption to host memory and speculation have to give the
tokens of transformers. The server is left out where there is no tritonserver.
"""

from __future__ import annotations

import gc
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import Assembly, assemble
from paged_bench._engine import Job, model_options, run_paged, workload
from paged_bench._harness import Record, Records, not_measured
from paged_bench._peers import load_transformers, padded
from paged_bench._servers import text_workload
from paged_client.serving.server_files import ServerNotFoundError
from paged_client.serving.tritonserver import TritonServer
from paged_client.sync_client import Client
from paged_kernels.compilation import after_ready

QUESTION, ANSWER = "What is the capital of France?", "Paris"
REQUESTS, SEQUENCES = 24, 16
POOL = 40  # blocks: too few for all requests, so that some are preempted
VARIANTS: dict[str, dict[str, object]] = {
    "float32": {"dtype": "float32"},
    "float32, preempted": {"dtype": "float32", "num_gpu_blocks_override": POOL, "preemption_mode": "swap"},
    "float32, n-gram drafts": {"dtype": "float32", "num_speculative_tokens": 3},
}


def started(options: dict[str, object], what: str, records: Records) -> Assembly:
    began = time.monotonic()
    assembly = assemble(EngineConfig.from_options(options))
    records.append(Record(f"load to ready, {what}", time.monotonic() - began, "s"))
    return assembly


def compared(args: Namespace, records: Records) -> bool:
    """Compare the greedy tokens of every variant with transformers'. Returns whether all are equal."""
    jobs: Sequence[Job] = ()
    expected: list[list[int]] = []
    equal = True
    for what, more in VARIANTS.items():
        options = model_options(args.model) | {"max_num_seqs": SEQUENCES, "gpu_memory_utilization": 0.4} | more
        assembly = started(options, what, records)
        if not expected:
            vocab, limit = assembly.loaded.spec.vocab_size, assembly.limits.max_model_len
            jobs = text_workload(workload("mixed", REQUESTS, vocab, limit, None), assembly.loaded.tokenizer).jobs
            peer = load_transformers(EngineConfig.from_options(options), assembly.loaded, assembly.device)
            expected = padded(peer)(jobs).outputs
            del peer
        compiled = after_ready.count
        found = run_paged(assembly, jobs).outputs
        same = sum(tokens == other for tokens, other in zip(found, expected, strict=True))
        stats = assembly.scheduler.stats
        done = {"swapped out": stats.swapped, "accepted draft tokens": stats.accepted_tokens}
        records.append(
            Record(f"requests with the tokens of transformers, {what}", same, "requests", len(jobs), peers=done)
        )
        records.append(Record(f"kernels compiled after ready, {what}", after_ready.count - compiled, "kernels", 0, 0))
        equal &= same == len(jobs)
        assembly.close()
        del assembly
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return equal


def answered(args: Namespace, records: Records) -> bool:
    """Ask in bfloat16, through tritonserver. Returns whether the answer is right."""
    options = model_options(args.model) | {"dtype": "bfloat16", "gpu_memory_utilization": 0.4}
    began = time.monotonic()
    try:
        server = TritonServer(str(options.pop("model")), options, engine_only=True, echo=print)
    except ServerNotFoundError as error:
        records.append(not_measured("server, answer", str(error)))
        return True
    with server:
        records.append(Record("server: start to ready", time.monotonic() - began, "s"))
        with Client(server.grpc_url, server.model_name) as client:
            messages = [{"role": "user", "content": QUESTION}]
            text = client.generate(messages=messages, max_tokens=24, temperature=0).text
        print(f"{QUESTION} {text}", flush=True)
        records.append(Record("server: answers that are right", int(ANSWER in text), "answers", 1, 1))
        return ANSWER in text


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog="python -m paged_bench._model_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="Hugging Face directory (default: the demo model)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to FILE")
    args = parser.parse_args(argv)
    records = Records(parser.prog, args.json)
    right = compared(args, records) & answered(args, records)
    records.save(complete=True)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
