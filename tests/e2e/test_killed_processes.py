"""`paged serve` ends when a process of its engine is killed, and every stream with one error. tests/client/serving has
the same for a model that loads at once, and for `--restart`."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_client.serving.ports import choose_ports
from paged_client.serving.server_files import REPOSITORY_ROOT
from tests.support.processes import children, needs_server
from tests.support.triton import listens, raw_stream
from tests.support.waiting import until

pytestmark = [needs_server, pytest.mark.nightly, pytest.mark.ranks]

OPTIONS = ["--dtype=float32", "--device=cpu", "--block-size=4", "--num-gpu-blocks-override=4096"]
STUB = b"/paged_llm/1/model.py\0"  # an argument of the process
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_tokens": 1 << 13}
MEMORY = Path("/sys/fs/cgroup/memory")  # of version 1


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def run_out_of_memory(pid):
    """Let the kernel kill a process: its next allocations exceed the limit of its control group."""
    group = MEMORY / f"paged_test_{pid}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 10))
    except OSError:
        pytest.skip("no control group of version 1 can be made")
    try:
        (group / "cgroup.procs").write_text(str(pid))
        until(lambda: not (group / "cgroup.procs").read_text().split(), "the end of the process")
    finally:
        with suppress(OSError):
            group.rmdir()


def find(pid, program):
    """Return the one process among a process and its descendants that runs a program."""
    found, left = [], [pid]
    while left:
        left += children(one := left.pop(0))
        if program in Path(f"/proc/{one}/cmdline").read_bytes():
            found.append(one)
    (process,) = found
    return process


@pytest.mark.parametrize(
    ("program", "end", "options", "message"),
    [
        (b"bin/tritonserver\0", kill, [], "tritonserver was ended by SIGKILL"),
        (STUB, kill, [], "was ended by SIGKILL"),
        (STUB, run_out_of_memory, [], "was ended by SIGKILL, as when the machine or its container is out"),
        (b"paged_backend.engine.rank\0", kill, ["--tensor-parallel-size=2"], "rank 1 of 2 has ended: its process"),
        (b"paged_backend.engine.rank\0", kill, ["--pipeline-parallel-size=2"], "rank 1 of 2 has ended: its process"),
        (
            b"paged_backend.server.connections.replica\0",
            kill,
            ["--data-parallel-size=2"],
            "The engine has failed: replica 1 has",
        ),
    ],
    ids=["tritonserver", "stub", "out of memory", "tensor parallel", "pipeline parallel", "replica"],
)
def test_a_killed_process_ends_the_server(long_model, tmp_path, program, end, options, message):
    ports = choose_ports(http=0, grpc=0, metrics=0, openai=0)
    named = (f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics", "openai"), ports, strict=True))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "paged_client",
            "serve",
            str(long_model[0]),
            *named,
            *OPTIONS,
            *options,
            f"--log-file={tmp_path}/log",
        ],
        cwd=REPOSITORY_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("Ready."), line or process.communicate()[1]
        gateway = HTTPConnection("localhost", ports[3], timeout=60)
        body = {"model": "paged_llm", "prompt": "two", "stream": True, "max_tokens": 1 << 13, "ignore_eos": True}
        gateway.request("POST", "/v1/completions", json.dumps(body))
        reply = gateway.getresponse()
        assert b'"text"' in reply.readline()
        with raw_stream(SimpleNamespace(grpc_url=f"localhost:{ports[1]}")) as stream:
            stream.send(text_input="one", stream=True, sampling_parameters=ENDLESS)
            assert stream.next().text is not None
            end(find(process.pid, program))
            began = time.monotonic()
            _, errors = process.communicate(timeout=120)
            assert time.monotonic() - began < 20  # the promise is 2 s
            (error,) = (response.error for response in stream.all() if response.error)
            assert error
            while not stream.responses.empty():  # the connection has ended, after the request
                assert stream.next().error.status() == "StatusCode.UNAVAILABLE"
        events = [line.removeprefix(b"data: ") for line in reply if line.startswith(b"data: {")]
        assert sum("error" in json.loads(event) for event in events) == 1, events[-2:]
    finally:
        process.kill()
    assert process.returncode == 1
    assert message in errors, errors
    assert not any(listens(port) for port in ports), "nothing answers, so nothing is ready"
