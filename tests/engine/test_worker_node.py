"""`paged worker` with a server that is played by the test."""

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from paged_backend.api.errors import ConfigError
from paged_backend.distributed.links import Meeting, connect
from paged_backend.distributed.topology import CLUSTER_SECRET
from paged_backend.engine import worker_node
from paged_backend.engine.rank import START_KEY, Invitation, Start, read_invitation, write_invitation
from paged_client.serving.ports import choose_ports
from tests.support.in_process import tiny_assembly
from tests.support.waiting import WAIT, until

SECRET = "secret of the ranks"


@pytest.mark.nightly
def test_rank_that_ends_before_the_start_is_started_again():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        meeting.settimeout(WAIT)
        invitation = Invitation(Meeting(*meeting.getsockname()), 2, 2)
        store.set(START_KEY, write_invitation(invitation, SECRET.encode()))
        command = [sys.executable, "-m", "paged_client", "worker", "--node-rank", "1"]
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), CLUSTER_SECRET: SECRET}
        with subprocess.Popen(command, env=environment) as worker:
            try:
                for _ in range(2):
                    meeting.accept()[0].close()  # ends the rank
            finally:
                worker.kill()


def test_invitation_of_a_stranger_starts_nothing(monkeypatch, caplog):
    """Who reaches the store can write to it: it must neither start thousands of ranks nor end the worker."""
    started = SimpleQueue()

    def start_rank(rank, *arguments):
        started.put(rank)
        raise ConfigError("enough")  # ends the worker

    monkeypatch.setattr(worker_node, "start_rank", start_rank)
    monkeypatch.setattr(worker_node, "RETRY_SECONDS", 0.01)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = Meeting("127.0.0.1", 1)
    store.set(START_KEY, write_invitation(Invitation(meeting, 4096, 2), b"another secret"))
    node = worker_node.WorkerNode("127.0.0.1", store.port, 1, SECRET.encode())
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(node.run)
        until(lambda: running.done() or "no server that knows the secret" in caplog.text)
        store.set(START_KEY, json.dumps(Invitation(meeting, 1, 1)))
        store.set(START_KEY, write_invitation(Invitation(meeting, 2, 2), SECRET.encode()))
        with pytest.raises(ConfigError, match="enough"):
            running.result(WAIT)
    assert started.get_nowait() == 1 and started.empty()


@pytest.mark.parametrize("model", [pytest.param("other weights", marks=pytest.mark.nightly), "missing"])
def test_worker_with_another_model_is_rejected(tiny, tmp_path, monkeypatch, model):
    """Its weights have the same shapes, so the engine would run, and its tokens would be wrong."""
    other = tmp_path / "other"
    if model == "other weights":
        shutil.copytree(tiny[0], other)
        tensors = load_file(other / "model.safetensors")
        save_file(
            {name: tensor * 1.01 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"}
        )
    problem = "file model.safetensors of the model: differs" if other.exists() else f'ConfigError: model="{other}"'
    (port,) = choose_ports(master_port=0)
    command = [sys.executable, "-m", "paged_client", "worker", "--node-rank", "1", "--model", str(other)]
    monkeypatch.setenv(CLUSTER_SECRET, SECRET)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    machines = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
    with subprocess.Popen(command, env=environment) as worker:
        try:
            with pytest.raises(ConfigError, match=f"rank 1 did not start: machine 1: {problem}"):
                tiny_assembly(tiny[0], **machines)
        finally:
            worker.kill()


def test_store_has_neither_secret_nor_options(tiny, monkeypatch):
    """Anyone who reaches it can read it. A rank gets the options after it has proved that it knows the secret."""
    monkeypatch.setenv(CLUSTER_SECRET, SECRET)
    (port,) = choose_ports(master_port=0)
    options = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
    options |= {"tensor_parallel_size": 2, "otlp_traces_endpoint": "http://user:PASSWORD@127.0.0.1:1/v1/traces"}
    with ThreadPoolExecutor(1) as thread:
        assembled = thread.submit(tiny_assembly, tiny[0], **options)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        written = store.get(START_KEY)
        invitation = read_invitation(written, SECRET.encode())
        assert invitation == (("127.0.0.1", invitation.meeting.port), 2, 2)
        assert json.loads(written.partition(b" ")[2]) == [["127.0.0.1", invitation.meeting.port], 2, 2]
        link, start = connect(invitation.meeting, SECRET.encode(), 1, WAIT)
        start = Start(*json.loads(start))
        assert start.options["model"] == str(tiny[0]) and "PASSWORD" not in str(start)
        link.send_bytes(b"enough")
        with pytest.raises(ConfigError, match="rank 1 did not start: machine 1: enough"):
            assembled.result()


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, "PAGED_CLUSTER_SECRET_FILE: missing; several machines need a file with the same secret"),
        ({CLUSTER_SECRET: "short"}, "PAGED_CLUSTER_SECRET: has 5 bytes; must be at least 16"),
        ({f"{CLUSTER_SECRET}_FILE": "{file}"}, "{file}: other users can access it .mode 0644.; run chmod o-rwx {file}"),
    ],
)
def test_unusable_secret_is_rejected(tiny, tmp_path, monkeypatch, variables, problem):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o644)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(file=file))
    options = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1"}
    with pytest.raises(ConfigError, match=problem.format(file=file)):
        tiny_assembly(tiny[0], **options)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(SystemExit, match=f"paged worker: .*{problem.format(file=file)}"):
        worker_node.main()
