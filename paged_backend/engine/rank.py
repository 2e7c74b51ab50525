"""The process of a rank other than 0.

Rank 0 is the server's process. Only rank 0 schedules. It sends the integers of each step to the other ranks, so all
ranks move the same blocks and run the same rows, each with its own attention heads and the layers of its stage.

The process has the environment of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. The first line
of its standard input is the secret of the ranks, in hexadecimal digits. It ends when its connection to rank 0 or its
standard input is closed.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import logging as transformers_logging

from paged_backend.api.config import EngineConfig
from paged_backend.distributed.links import Meeting, connect
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.distributed.stage_links import StageLinks
from paged_backend.distributed.step_channel import StepChannel
from paged_backend.engine.model_memory import MemoryCommand
from paged_backend.engine.model_preparation import PreparedModel, prepare_model, stage_links
from paged_backend.engine.rank_facts import rank_facts
from paged_backend.execution.batch import PackedBatch
from paged_backend.execution.runner import Runner
from paged_backend.loading.description import pick_device
from paged_backend.loading.model_source import find_model
from paged_backend.models.pipeline import Stage
from paged_backend.models.tensor_parallel import pick_rank_device
from paged_backend.scheduling.plan import Plan
from paged_backend.utils.child_process import start_module
from paged_kernels.compilation import after_ready

log = logging.getLogger("paged_llm")

CONNECT_SECONDS = 30
RANK_LIMIT = 64 * 64  # maximum tensor_parallel_size * pipeline_parallel_size
START_KEY = "paged/start"  # in the store, which anyone can read, while rank 0 waits for the others: an `Invitation`
STEP_MESSAGES = (PackedBatch, Plan, MemoryCommand, type(None))  # None: the last one
READY = "ready "  # begins the message of a rank that can use its device, before its facts as JSON


class Invitation(NamedTuple):
    """What rank 0 tells ranks before they have proved that they know the secret."""

    meeting: Meeting
    size: int  # ranks on all machines
    num_nodes: int


class Start(NamedTuple):
    """What rank 0 tells ranks when they have proved that they know the secret."""

    options: dict[str, Any]
    session: str  # random

    def key(self, secret: bytes) -> bytes:
        """Return the key of the messages between the ranks, which differs after each start."""
        return hmac.digest(secret, self.session.encode(), "sha256")


def write_invitation(invitation: Invitation, secret: bytes) -> str:
    """Return an invitation as text, with a proof that its writer knows the secret."""
    text = json.dumps(invitation)
    return f"{_proof(text.encode(), secret)} {text}"


def read_invitation(sealed: bytes, secret: bytes) -> Invitation:
    """Return an invitation. Raises ValueError or TypeError if no server that knows the secret has written it."""
    proof, _, text = sealed.partition(b" ")
    if not hmac.compare_digest(proof, _proof(text, secret).encode()):
        raise ValueError("no server that knows the secret of the ranks has written it")
    meeting, size, num_nodes = json.loads(text)
    if not 1 <= num_nodes <= size <= RANK_LIMIT:
        raise ValueError(f"{size} ranks on {num_nodes} machines")
    return Invitation(Meeting(*meeting), size, num_nodes)


def _proof(text: bytes, secret: bytes) -> str:
    return hmac.digest(secret, b"invitation" + text, "sha256").hex()


def options_of(config: EngineConfig) -> dict[str, Any]:
    """Return the options of the other ranks. Leaves out `otlp_traces_endpoint`, which only rank 0 uses and which may
    hold a password. `remote_cache_url` may hold one, too, but is rejected with several ranks."""
    return asdict(replace(config, otlp_traces_endpoint=None))


def start_rank(
    rank: int, local_rank: int, secret: bytes, environment: Mapping[str, str], *arguments: str
) -> subprocess.Popen[bytes]:
    """Start the process of a rank, which ends with this process. environment: MASTER_ADDR, MASTER_PORT, WORLD_SIZE.
    Raises OSError."""
    # LOCAL_RANK selects the GPU in transformers.
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    return start_module(
        "paged_backend.engine.rank",
        *arguments,
        first=f"{secret.hex()}\n".encode(),
        environment={**environment, **ranks},
    )


def run(link: Connection, store: dist.Store, config: EngineConfig, rank: int, key: bytes) -> None:
    """Run the steps that rank 0 sends, until it sends None."""
    transformers_logging.disable_progress_bar()
    device = pick_rank_device(pick_device(config), int(os.environ["LOCAL_RANK"]))
    torch.zeros(1, device=device)  # fails for an unusable GPU, before other ranks wait
    link.send_bytes((READY + json.dumps(rank_facts(find_model(config)))).encode())
    group = ProcessGroup(device, rank, config.num_ranks, key)
    group.join(store, os.environ["MASTER_ADDR"])
    steps = StepChannel(key, *STEP_MESSAGES)
    prepared = prepare_model(config, group)
    runner = prepared.runner
    if device.type == "cuda":
        after_ready.watch()  # for the log; the metric counts rank 0, which runs the same kernels
    if links := stage_links(config, prepared, group):
        stage = StageRunner(runner, links)
        for message, arriving in stage.messages(steps):
            run_message(prepared, message, partial(stage.launch, arriving=arriving))
    else:
        while (message := steps.receive()) is not None:
            run_message(prepared, message, runner.launch)
    runner.release_graphs()  # NCCL cannot shut down while graphs hold its calls
    group.leave()


def run_message(prepared: PreparedModel, message: Any, launch: Callable[[PackedBatch], object]) -> None:
    """Do what rank 0 does: a step, block transfers, or a change of the model's memory. launch: runs a step."""
    if isinstance(message, Plan):
        prepared.runner.move(message)
    elif isinstance(message, MemoryCommand):
        prepared.memory.run(message)
    else:
        launch(message)


def end_with(link: Connection) -> None:
    """End the process when rank 0 or the process that started this one ends, even if this one hangs."""

    def watch_link() -> None:
        try:
            while reason := link.recv_bytes():  # for which rank 0 ends the connection
                log.error(reason.decode())
        except (EOFError, OSError):
            pass
        os._exit(1)

    def watch_parent() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    for watch in (watch_link, watch_parent):
        threading.Thread(target=watch, name=watch.__name__, daemon=True).start()


def main(model: str | None = None) -> None:
    """Run the rank that the environment names. model: the directory of the model on this machine, if it differs from
    the server's."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    rank, seconds = int(os.environ["RANK"]), timedelta(seconds=CONNECT_SECONDS)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=seconds)
    secret = bytes.fromhex(sys.stdin.readline())
    meeting, *_ = read_invitation(store.get(START_KEY), secret)
    link, told = connect(meeting, secret, rank, CONNECT_SECONDS)
    start = Start(*json.loads(told))
    config = EngineConfig.from_options(start.options)
    end_with(link)
    try:
        run(link, store, replace(config, model=model or config.model), rank, start.key(secret))
    except Exception as error:
        link.send_bytes(f"{type(error).__name__}: {error}".encode())
        raise
    os._exit(0)  # the interpreter's own shutdown takes a second


class StageRunner:
    """The part of any rank but 0 in the steps of its stage."""

    def __init__(self, runner: Runner, links: StageLinks):
        """runner: computes the layers of the stage."""
        stage = Stage.of(runner.model)
        assert stage is not None
        self._runner, self._links, self._stage = runner, links, stage

    def messages(self, steps: StepChannel) -> Iterator[tuple[Any, Callable[[], Tensor] | None]]:
        """Yield the messages of rank 0 until it ends, each with a function that waits for the hidden states of a step.

        A thread receives them, so rank 0 need not wait until this stage has computed earlier steps. It posts the
        receive of hidden states as well. Raises the error of the thread.
        """
        received: SimpleQueue[tuple[Any, Callable[[], Tensor] | None]] = SimpleQueue()

        def receive() -> None:
            try:
                while (message := steps.receive()) is not None:
                    is_step = isinstance(message, PackedBatch)
                    received.put(
                        (message, self._links.expect_hidden_states(message.input_ids.shape[1]) if is_step else None)
                    )
                received.put((None, None))
            except Exception as error:
                received.put((error, None))

        threading.Thread(target=receive, name="steps", daemon=True).start()
        while (entry := received.get())[0] is not None:
            if isinstance(entry[0], Exception):
                raise entry[0]
            yield entry

    def launch(self, packed: PackedBatch, arriving: Callable[[], Tensor] | None) -> None:
        """Compute this stage's part of a step and send what follows from it. arriving: waits for its hidden states;
        None in the first stage."""
        with self._stage.receiving(arriving() if arriving else None):
            launched = self._runner.launch(packed)
        if launched.hidden_states is not None:
            self._links.send_hidden_states(launched.hidden_states)
        elif self._links.sends_results:
            self._links.send_results(launched.on_host())


if __name__ == "__main__":
    main(*sys.argv[1:])
