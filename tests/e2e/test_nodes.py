"""A model on several machines, which are network namespaces: tokens, and what happens when a machine is lost."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import transformers as hf

from paged_bench import _machines as network
from paged_client.serving.ports import choose_ports
from paged_client.serving.tritonserver import TritonServer
from tests.support import delayed_link
from tests.support.in_process import byte_tokenizer, generate_with_transformers, save_tiny
from tests.support.processes import rank_processes
from tests.support.triton import START_SECONDS, raw_stream
from tests.support.waiting import until

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.nightly,
    pytest.mark.skipif(not network.available(), reason=network.MISSING),
]

GREEDY = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
SECRET = {"PAGED_CLUSTER_SECRET": "secret of the ranks"}
CUT = "\ufffd"  # of a character that the end truncates
PROMPTS = ["one, two", "a longer prompt, which takes several blocks of four tokens", "x"]
OPTIONS = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_gpu_blocks_override": 160}


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    """(directory, model): heads can be divided by 2 and by 3, with the tokenizer of the tiny model."""
    directory = tmp_path_factory.mktemp("heads")
    config = hf.Qwen2Config(
        vocab_size=hf.AutoConfig.from_pretrained(tiny[0]).vocab_size,
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=256,
    )
    made = save_tiny(config, directory)
    hf.AutoTokenizer.from_pretrained(tiny[0]).save_pretrained(directory)
    return directory, made


@pytest.fixture(scope="module")
def expected(model):
    tokenizer = byte_tokenizer()
    tokens = [generate_with_transformers(model[1], tokenizer.encode(prompt), 16) for prompt in PROMPTS]
    return [tokenizer.decode(one).rstrip(CUT) for one in tokens]


def generate(server, prompt):
    with raw_stream(server) as stream:
        sampling = GREEDY | {"max_tokens": 16}
        stream.send(text_input=prompt, exclude_input_in_output=True, sampling_parameters=sampling)
        return stream.all()[0].text.rstrip(CUT)


def generate_together(server):
    """Return the texts of requests that run at the same time, so that the stages of a pipeline all have work."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(lambda prompt: generate(server, prompt), PROMPTS))


@contextmanager
def workers(machines, port, log):
    """Run `paged worker` on each machine, with the environment of torchrun."""
    with ExitStack() as stack:
        for number, machine in enumerate(machines, 1):
            environment = {**os.environ, **SECRET, "MASTER_ADDR": network.server_address(), "MASTER_PORT": str(port)}
            command = machine.command(sys.executable, "-m", "paged_client", "worker", "--node-rank", str(number))
            process = subprocess.Popen(command, env=environment, stderr=stack.enter_context(log.open("ab")))
            stack.callback(process.wait)
            stack.callback(process.kill)
        try:
            yield
        except BaseException:
            print(f"log of the workers:\n{log.read_text()}")  # shown with the failure
            raise


@contextmanager
def distributed(model, port, nodes, **sizes):
    """Run a server that waits for the workers of the other machines. Fails if they do not come."""
    shared = sizes | {"nnodes": nodes, "master_addr": network.server_address(), "master_port": port}
    server = TritonServer(model[0], OPTIONS | shared, engine_only=True, environment=SECRET)
    server.start()
    try:
        server.wait_ready(START_SECONDS)
        yield server
    finally:
        server.stop()


def ranks(port):
    """Return the processes of the ranks on all machines but the server's."""
    return rank_processes("MASTER_PORT", port)


def assert_one_clear_error(stream, message):
    errors = [str(response.error) for response in stream.all() if response.error]
    assert len(errors) == 1
    assert message in errors[0]


@contextmanager
def endless_stream(server):
    with raw_stream(server) as stream:
        stream.send(text_input="one", stream=True, sampling_parameters=GREEDY | {"max_tokens": 240})
        assert stream.next().text is not None
        yield stream


LAYOUTS = pytest.mark.parametrize("kind", ["tensor_parallel_size", "pipeline_parallel_size"])


@LAYOUTS
def test_two_machines_match_one_and_a_cut_link_is_noticed(model, expected, tmp_path, kind):
    port = choose_ports(http_port=0, grpc_port=0, metrics_port=0)[0]
    with network.machines(1) as machines, workers(machines, port, tmp_path / "log"):
        with distributed(model, port, 2, **{kind: 2}) as server:
            assert generate_together(server) == expected
            with endless_stream(server) as stream:
                machines[0].cut()
                assert_one_clear_error(stream, "rank 1 of 2 has ended: machine 1 cannot be reached")
        machines[0].mend()
        until(lambda: not ranks(port), "the end of the rank")
        with distributed(model, port, 2, **{kind: 2}) as server:
            assert generate(server, PROMPTS[0]) == expected[0]


@LAYOUTS
def test_three_machines_match_one_and_a_killed_worker_is_noticed(model, expected, tmp_path, kind):
    port = choose_ports(http_port=0, grpc_port=0, metrics_port=0)[0]
    with network.machines(2) as machines, workers(machines, port, tmp_path / "log"):
        with distributed(model, port, 3, **{kind: 3}) as server:
            assert generate_together(server) == expected
            with endless_stream(server) as stream:
                os.kill(ranks(port)[0], signal.SIGKILL)
                assert_one_clear_error(stream, "of 3 has ended: its process on machine")
        until(lambda: not ranks(port), "the end of the ranks")
        with distributed(model, port, 3, **{kind: 3}) as server:
            assert generate(server, PROMPTS[0]) == expected[0]


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_latency_changes_no_token(model, expected, tmp_path, sizes):
    port = choose_ports(http_port=0, grpc_port=0, metrics_port=0)[0]
    with (
        delayed_link.delayed_machine(50) as machine,
        workers([machine], port, tmp_path / "log"),
        distributed(model, port, 2, **sizes) as server,
    ):
        assert generate(server, PROMPTS[0]) == expected[0]


def test_two_stages_of_two_ranks_on_two_machines_match_one(model, expected, tmp_path):
    port = choose_ports(http_port=0, grpc_port=0, metrics_port=0)[0]
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with (
        network.machines(1) as machines,
        workers(machines, port, tmp_path / "log"),
        distributed(model, port, 2, **sizes) as server,
    ):
        assert len(ranks(port)) == 3  # one of the server's machine, two of the other
        assert generate_together(server) == expected
