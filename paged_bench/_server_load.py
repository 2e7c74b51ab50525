"""Generates load for a served model, with our load generator (client/paged_client/load.py) and with perf_analyzer."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paged_bench._report import Record, percentile
from paged_bench._workload import Job
from paged_client import load
from paged_client.serving.repository import MODEL_NAME
from paged_client.serving.server_files import perf_analyzer
from paged_client.serving.tritonserver import TritonServer
from paged_client.wire import Values

POPULATION_TIMEOUT = 60  # seconds
MAX_ATTEMPTS = 6  # exports of perf_analyzer 2.51 are sometimes empty or truncated
WORDS = (
    "the a of to and in that it was for on with as his her they at be this from had not are but by we you one all were"
).split()


class AnalyzerError(RuntimeError):
    """perf_analyzer has failed. The message has its error."""


@dataclass(frozen=True)
class LoadResult:
    """The throughput and latencies that a client measured. Times are in seconds."""

    tokens: int
    seconds: float  # time from the first request to the last response
    responses: int
    first: list[float]  # time to the first response of each request
    between: list[float]  # times between two responses of a request

    @classmethod
    def of(cls, sent: Sequence[float], stamps: Sequence[Sequence[float]], tokens: int) -> LoadResult:
        """Return the result of requests.

        Args:
            sent: when each request was sent.
            stamps: when each of its responses arrived.
            tokens: output tokens of all requests.
        """
        return cls(
            tokens,
            max(one[-1] for one in stamps) - min(sent),
            sum(map(len, stamps)),
            [one[0] - begin for begin, one in zip(sent, stamps, strict=True)],
            [later - earlier for one in stamps for earlier, later in itertools.pairwise(one)],
        )

    def records(self, what: str) -> Iterator[Record]:
        yield Record(f"output_throughput {what}", self.tokens / self.seconds, "tokens/s")
        yield Record(f"tokens per response {what}", self.tokens / self.responses, "tokens")
        for name, values in (("time to first response", self.first), ("time between responses", self.between)):
            for share in (0.5, 0.99) if values else ():
                yield Record(f"{name} p{100 * share:.0f} {what}", 1e3 * percentile(values, share), "ms")


@dataclass(frozen=True)
class TextWorkload:
    """The same requests as token ids for the engine and as text for a server."""

    jobs: list[Job]
    texts: list[str]

    @property
    def tokens(self) -> int:
        return sum(job.output for job in self.jobs)

    @property
    def requests(self) -> list[Values]:
        return [{"text_input": text, "stream": True, "sampling_parameters": self._sampling(job)} for text, job in self]

    @property
    def input_data(self) -> str:
        """The requests as input data of perf_analyzer."""
        data = [{name: [value] for name, value in request.items()} for request in self.requests]
        return json.dumps({"data": data})

    def __iter__(self) -> Iterator[tuple[str, Job]]:
        return zip(self.texts, self.jobs, strict=True)

    @staticmethod
    def _sampling(job: Job) -> str:
        return json.dumps({"max_tokens": job.output, "temperature": 0, "ignore_eos": True})


def text_workload(jobs: Sequence[Job], tokenizer: Any) -> TextWorkload:
    """Replace the random tokens of prompts by words, whose text a server tokenizes to the same tokens."""
    rng = random.Random(0)
    texts, text_jobs = [], []
    for job in jobs:
        ids = tokenizer.encode(" ".join(rng.choices(WORDS, k=len(job.prompt))), add_special_tokens=False)
        texts.append(tokenizer.decode(ids[: len(job.prompt)]))
        text_jobs.append(replace(job, prompt=tokenizer.encode(texts[-1])))
    return TextWorkload(text_jobs, texts)


def run_lean_client(server: TritonServer, work: TextWorkload, concurrency: int) -> LoadResult:
    """Run all requests with our load generator."""
    times = load.closed_loop(server.grpc_url, MODEL_NAME, work.requests, concurrency)
    return LoadResult.of([one.sent for one in times], [one.stamps for one in times], work.tokens)


def run_perf_analyzer(server: TritonServer, work: TextWorkload, *flags: str) -> LoadResult:
    """Run every request once with perf_analyzer. Raises AnalyzerError.

    With --request-count it measures a single window and does not wait for stable results.
    """
    found = perf_analyzer()
    assert found is not None
    binary, environment = found
    with tempfile.TemporaryDirectory() as scratch:
        input_data, export = Path(scratch, "in.json"), Path(scratch, "out.json")
        input_data.write_text(work.input_data)
        command = [str(binary), "-m", MODEL_NAME, "-u", server.grpc_url, "-i", "grpc", "--async", "--streaming"]
        command += ["--input-data", str(input_data), "--request-count", str(len(work.jobs))]
        command += ["--profile-export-file", str(export), *flags]
        for _ in range(MAX_ATTEMPTS):
            export.unlink(missing_ok=True)  # perf_analyzer does not overwrite files
            completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if completed.returncode:
                reason = " ".join(completed.stderr.partition("Usage: ")[0].split())  # the error without the usage text
                raise AnalyzerError(f"perf_analyzer exits with {completed.returncode}: {reason or 'no reason given'}")
            with contextlib.suppress(json.JSONDecodeError):
                return read_export(json.loads(export.read_text()))
    raise AnalyzerError(f"{MAX_ATTEMPTS} exports of perf_analyzer were truncated")


def read_export(export: dict[str, Any]) -> LoadResult:
    """Parse an export of perf_analyzer, whose timestamps are nanoseconds.

    All requests ignore the end of sequence, so that each one has max_tokens output tokens.
    """
    (experiment,) = export["experiments"]
    requests = experiment["requests"]
    assert all(request.get("success", True) for request in requests)
    tokens = sum(json.loads(one["request_inputs"]["sampling_parameters"])["max_tokens"] for one in requests)
    stamps = [[when / 1e9 for when in one["response_timestamps"]] for one in requests]
    return LoadResult.of([one["timestamp"] / 1e9 for one in requests], stamps, tokens)


def busy_cores(server: TritonServer, run: Callable[[], object]) -> dict[str, float]:
    """Return how many cores the server, the model's process and the client use during `run`.

    The one that reaches its limit is the bottleneck. The limit of the model's process is about 1, because of the GIL.
    """
    model = [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
    before, client, begin = [cpu_seconds([server.pid]), cpu_seconds(model)], _client_seconds(), time.perf_counter()
    run()
    wall = time.perf_counter() - begin
    after = [cpu_seconds([server.pid]), cpu_seconds(model)]
    used = [later - earlier for earlier, later in zip(before, after, strict=True)] + [_client_seconds() - client]
    return {name: one / wall for name, one in zip(("tritonserver", "model", "client"), used, strict=True)}


def wait_until_populated(server: TritonServer) -> None:
    """Wait until the model's process is idle: after the load it populates the pages of its KV cache."""
    print("waiting until the KV cache is populated ...", file=sys.stderr, flush=True)
    for _ in range(POPULATION_TIMEOUT):
        if busy_cores(server, lambda: time.sleep(1))["model"] < 0.1:
            return
    print("the model's process is still busy", file=sys.stderr, flush=True)


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time of processes so far."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _client_seconds() -> float:
    """Return the CPU time of this process and of its child processes that have ended, such as perf_analyzer."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)
