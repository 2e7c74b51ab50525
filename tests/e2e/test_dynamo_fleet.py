"""Several servers behind NVIDIA Dynamo's frontend: routing by KV cache events, failures, and separate prefill."""

import json
import signal
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from paged_client import Client
from paged_client.cli import main
from paged_client.serving.ports import choose_ports
from paged_client.serving.tritonserver import TritonServer
from tests.support.dynamo import frontend
from tests.support.in_process import byte_tokenizer, generate_with_transformers
from tests.support.processes import needs_server
from tests.support.redis_server import needs_redis, running_redis
from tests.support.triton import MODEL, metrics
from tests.support.waiting import WAIT, until

pytestmark = [needs_server, pytest.mark.nightly]
BLOCK = 4
OPTIONS = {"dtype": "float32", "block_size": BLOCK, "num_gpu_blocks_override": 4096, "max_num_seqs": 16}
TEXT = "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money, "
LONG = 1500  # tokens of streams that are open while something fails
CUT = "\ufffd"  # of a character that the end truncates


def start(model, **ports):
    (events,) = choose_ports(events=0)
    published = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{events}"}
    return TritonServer(model[0], OPTIONS | {"kv_events_config": published}, engine_only=True, **ports)


@pytest.fixture(scope="module")
def servers(long_model):
    with start(long_model) as first, start(long_model) as second:
        yield first, second


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    with frontend(tmp_path_factory.mktemp("discovery"), "--router-mode", "kv", "--migration-limit", "3") as made:
        yield made


def completion(front, prompt, num_tokens, **fields):
    """Return the open answer to a completion request."""
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": num_tokens}
    body = json.dumps({"model": MODEL, "prompt": prompt, **sampling, **fields}).encode()
    request = urllib.request.Request(f"{front.url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=WAIT)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code}: {error.read().decode()}") from None


def ask(front, prompt, num_tokens=4):
    with completion(front, prompt, num_tokens) as reply:
        return json.load(reply)


def cached(front, prompt):
    return ask(front, prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]


class Stream(threading.Thread):
    """A streaming completion on a thread: its text so far, and why it ended."""

    def __init__(self, front, prompt, num_tokens):
        super().__init__(daemon=True)
        self.text, self.reason, self.error, self.begun = "", None, None, threading.Event()
        self._wanted = front, prompt, num_tokens
        self.start()

    def run(self):
        try:
            with completion(*self._wanted, stream=True) as reply:
                for line in reply:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        for choice in event.get("choices", []):
                            self.text += choice["text"]
                            self.reason = choice.get("finish_reason") or self.reason
                            self.begun.set()
                        self.error = event.get("error") or self.error
                    elif line.startswith((b"event: error", b": ")):
                        self.error = line.decode()
        except Exception as error:
            self.error = error
        finally:
            self.begun.set()


def running(server):
    return metrics(server)["paged_requests{running}"]


def expected(server, prompt, num_tokens):
    with Client(server.grpc_url) as engine:
        return engine.generate(prompt, temperature=0, ignore_eos=True, max_tokens=num_tokens).text.rstrip(CUT)


def test_repeated_prompts_go_to_the_server_that_has_them(servers, front):
    with front.worker(*servers):
        front.wait_for(MODEL)
        until(lambda: front.instances() == 2, "both workers")
        prompts = [f"{number}: {TEXT}" for number in range(6)]
        with ThreadPoolExecutor(len(prompts)) as pool:  # at once, so that both servers get some
            list(pool.map(lambda prompt: cached(front, prompt), prompts))
        assert all(metrics(server)["paged_prompt_tokens_total"] for server in servers)
        blocks = (len(prompts[0]) - 1) // BLOCK * BLOCK
        until(lambda: cached(front, prompts[0]) >= blocks, "the router's knowledge of the blocks")
        assert [cached(front, prompt) >= blocks for prompt in prompts] == [True] * len(prompts)


def test_a_worker_that_stops_finishes_its_streams(servers, front):
    """It gets SIGTERM. A server that sleeps gets no requests, either."""
    first, second = servers
    with front.worker(first) as stopped:
        front.wait_for(MODEL)
        stream = Stream(front, TEXT, LONG)
        until(lambda: running(first) == 1, "the stream")
        with front.worker(second):
            until(lambda: front.instances() == 2, "both workers")
            stopped.send_signal(signal.SIGTERM)
            until(lambda: front.instances() == 1, "the end of the first worker in the discovery")
            before = metrics(first)["paged_prompt_tokens_total"]
            assert len({ask(front, f"{number}: {TEXT}")["id"] for number in range(4)}) == 4
            stream.join(WAIT)
            assert (stream.error, stream.reason) == (None, "length")
            assert stream.text.rstrip(CUT) == expected(second, TEXT, LONG)
            assert metrics(first)["paged_prompt_tokens_total"] == before
            assert stopped.wait(WAIT) == 0
            assert main(["sleep", "--url", second.grpc_url]) == 0
            until(lambda: front.instances() == 0, "the end of a sleeping server in the discovery")
            assert main(["wake", "--url", second.grpc_url]) == 0
            until(lambda: front.instances() == 1, "the server that woke")
            until(lambda: MODEL in front.models(), "the model")
            assert ask(front, "awake")["usage"]["completion_tokens"] == 4


@needs_redis
def test_prefill_and_decode_workers(tiny, front, tmp_path):
    """The decode server computes none of the prompt's full blocks. It has a remote cache in common with the other."""
    with running_redis(tmp_path) as store:
        tier = {"remote_cache_url": store.url, "swap_space": 0.01, "tier_read_mode": "always"}
        options = OPTIONS | {"num_gpu_blocks_override": 256} | tier | {"remote_cache_timeout_ms": 10_000}
        secret = {"PAGED_REMOTE_CACHE_SECRET": "secret that the servers share"}
        with (
            TritonServer(tiny[0], options, engine_only=True, environment=secret) as prefill,
            TritonServer(tiny[0], options, engine_only=True, environment=secret) as decode,
            front.worker(prefill, flags=("--role", "prefill")),
            front.worker(decode, flags=("--role", "decode")),
        ):
            front.wait_for(MODEL)
            until(lambda: front.instances() == 2, "both workers")
            tokens = generate_with_transformers(tiny[1], byte_tokenizer().encode(TEXT), 8)
            answer = ask(front, TEXT, 8)
            assert answer["choices"][0]["text"].rstrip(CUT) == byte_tokenizer().decode(tokens).rstrip(CUT)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(TEXT) - 1) // BLOCK * BLOCK
            assert metrics(prefill)["paged_remote_blocks_written_total"] == len(TEXT) // BLOCK
            assert metrics(decode)["paged_remote_blocks_read_total"] == (len(TEXT) - 1) // BLOCK
            prefill.kill()
            until(lambda: front.instances() == 1, "the end of the prefill worker in the discovery")
            assert cached(front, "Without the prefill server: " + TEXT) == 0
            ports = {name: getattr(prefill, name) for name in ("http_port", "grpc_port", "metrics_port")}
            with TritonServer(tiny[0], options, engine_only=True, environment=secret, **ports):
                until(lambda: front.instances() == 2, "the worker of the new prefill server")
                prompts = (f"{number}: {TEXT}" for number in range(100, 1000))
                until(lambda: cached(front, next(prompts)) > 0, "a prompt that the new prefill server has computed")


def test_streams_continue_on_another_server(servers, front, long_model):
    """A server is killed under load. Its worker leaves, and comes back with a new server at the same address. The last
    test: it kills a server."""
    first, second = servers
    prompts = [f"{letter}: {TEXT}" for letter in "abcdef"]
    with front.worker(first), front.worker(second):
        front.wait_for(MODEL)
        until(lambda: front.instances() == 2, "both workers")
        streams = [Stream(front, prompt, LONG) for prompt in prompts]
        for stream in streams:
            assert stream.begun.wait(WAIT)
        until(lambda: running(first), "requests on the server to kill")  # no server has cached these prompts
        first.kill()
        more = [Stream(front, prompt, 8) for prompt in prompts]  # requests of this moment are not lost, either
        for stream in (*streams, *more):
            stream.join(WAIT)
        assert [stream.error for stream in (*streams, *more)] == [None] * 12
        texts = [expected(second, prompt, LONG) for prompt in prompts]
        assert [stream.text.rstrip(CUT) for stream in streams] == texts
        assert {stream.reason for stream in (*streams, *more)} == {"length"}
        until(lambda: front.instances() == 1, "the end of the server's worker in the discovery")
        ports = {name: getattr(first, name) for name in ("http_port", "grpc_port", "metrics_port")}
        with start(long_model, **ports) as again:
            until(lambda: front.instances() == 2, "the worker of the new server")
            with ExitStack() as open_streams:
                several = [Stream(front, f"{number}: again", LONG) for number in range(6)]
                open_streams.callback(lambda: [stream.join(WAIT) for stream in several])
                until(lambda: running(again) > 0, "a request on the new server")
            assert {stream.reason for stream in several} == {"length"}
