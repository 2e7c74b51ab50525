"""Third-party clients with a real server: litellm, llama-index, aiperf and genai-perf.

They run in an environment of their own, which is created once in the cache directory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged_client import Client
from paged_client.serving import server_files
from paged_client.serving.environments import EnvironmentSetupError
from tests.support.gateway import gateway
from tests.support.locked_environment import LockedEnvironment
from tests.support.triton import MODEL, idle
from tests.support.waiting import WAIT

pytestmark = pytest.mark.nightly  # their environment has 1 GB of packages
HERE = Path(__file__).parent
PROMPT = "The capital of France is"
REQUESTS, INPUT, OUTPUT = 6, 32, 8
ATTEMPTS = 3


@pytest.fixture(scope="module")
def clients():
    """The directory of the environment's programs."""
    if sys.version_info < (3, 11):
        pytest.skip("the clients' packages are pinned for CPython 3.11 and later, which aiperf needs")
    environment = LockedEnvironment("clients", HERE / "clients.txt")
    try:
        environment.ensure()
    except EnvironmentSetupError as error:  # no network
        pytest.skip(f"the clients cannot be installed: {error}")
    return environment.python.parent


@pytest.fixture(scope="module")
def front(server):
    with gateway(server.grpc_url) as made:
        yield made


def run(*command, **variables):
    # With HF_HUB_OFFLINE aiperf does not accept a directory as its tokenizer.
    mine = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    done = subprocess.run(
        list(map(str, command)), env=mine | variables, capture_output=True, text=True, timeout=2 * WAIT, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def litellm(clients, server, front):
    """The results of the litellm calls."""
    url = f"http://{server.http_url}/v2/models/{MODEL}/generate"
    return json.loads(run(clients / "python", HERE / "litellm_calls.py", url, f"{front.url}/v1", PROMPT))


@pytest.fixture(scope="module")
def engine(server):
    with Client(server.grpc_url) as made:
        yield made


class TestLiteLLM:
    def test_its_triton_provider(self, litellm, engine):
        text = engine.generate(PROMPT, temperature=0, max_tokens=12).text
        assert (
            litellm["triton"] == PROMPT + text
        )  # as with Triton's vLLM backend, non-streaming output begins with the prompt
        assert litellm["triton, streamed"] == text
        assert litellm["triton, async"] == [PROMPT + text, text]
        assert "min_p=2: must be at least 0 and at most 1" in litellm["triton, refused"]

    def test_its_openai_provider(self, litellm, engine):
        messages = [{"role": "user", "content": PROMPT}]
        chat = engine.generate(messages=messages, temperature=0, max_tokens=12)
        assert litellm["chat"] == chat.text
        assert litellm["chat, streamed"] == [chat.text, chat.num_output_tokens]
        assert "seed=" in litellm["chat, refused"]
        assert litellm["text"] == engine.generate(PROMPT, temperature=0, max_tokens=12).text
        for values, text in zip(litellm["embedding"], (PROMPT, "x"), strict=True):
            assert values == pytest.approx(engine.embed(text).values, abs=1e-5)


def test_llama_index(clients, server, engine):
    """It reads one token less than it requests, or stops earlier if a response has several tokens."""
    text = engine.generate(PROMPT, temperature=0, max_tokens=12).text
    answers = json.loads(run(clients / "python", HERE / "llama_index_calls.py", server.grpc_url, PROMPT, 12))
    for found in (answers["complete"], "".join(answers["stream"])):
        assert found
        assert text.startswith(found)
    idle(server)


def measured(report):
    """Check what every report of a successful run contains."""
    average = {name: entry["avg"] for name, entry in report.items() if isinstance(entry, dict) and "avg" in entry}
    assert average["request_count"] == REQUESTS
    assert average["input_sequence_length"] == pytest.approx(INPUT, abs=2)
    assert average["request_throughput"] > 0
    assert average["request_latency"] > 0
    return average


def check_streams(average, *, least=OUTPUT - 2):
    # It counts tokens by tokenizing the text again, which may merge or split tokens.
    assert least <= average["output_sequence_length"] <= OUTPUT + 2
    assert 0 < average["time_to_first_token"] < average["request_latency"]
    assert 0 < average["inter_token_latency"] < average["request_latency"]


class TestAIPerf:
    @pytest.mark.parametrize(
        "kind", ["chat", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("completions", "embeddings"))]
    )
    def test_benchmark_through_the_gateway(self, clients, front, server, demo_model, tmp_path, kind):
        generates = kind != "embeddings"
        output = ("--osl", OUTPUT, "--osl-stddev", 0, "--streaming", "--extra-inputs", "ignore_eos:true")
        run(
            clients / "aiperf", "profile", "--model", MODEL, "--tokenizer", demo_model, "--url", front.url,
            "--endpoint-type", kind, "--request-count", REQUESTS, "--concurrency", 2, "--isl", INPUT,
            "--isl-stddev", 0, "--random-seed", 1, "--ui", "none", "--output-artifact-dir", tmp_path,
            *(output if generates else ()),
        )  # fmt: skip
        report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
        assert report["error_summary"] == []
        average = measured(report)
        if generates:
            check_streams(average)
            assert average["usage_completion_tokens"] == OUTPUT
        records = (tmp_path / "profile_export.jsonl").read_text().splitlines()
        assert [json.loads(line).get("error") for line in records] == [None] * REQUESTS
        idle(server)


class TestGenAIPerf:
    def profile(self, clients, demo_model, directory, *flags):
        """perf_analyzer, which it runs, sometimes leaves a truncated file without an error."""
        found = server_files.perf_analyzer()
        if found is None:
            pytest.skip("perf_analyzer cannot run here: it needs glibc 2.34")
        binary, variables = found
        variables = {"LD_LIBRARY_PATH": variables.get("LD_LIBRARY_PATH", ""),
                     "PATH": os.pathsep.join([str(binary.parent), variables["PATH"]])}  # fmt: skip
        for attempt in range(ATTEMPTS):
            place = directory / str(attempt)
            try:
                run(
                    clients / "genai-perf", "profile", "--model", MODEL, "--tokenizer", demo_model,
                    "--request-count", REQUESTS, "--concurrency", 2, "--streaming", "--num-dataset-entries", 4,
                    "--synthetic-input-tokens-mean", INPUT, "--synthetic-input-tokens-stddev", 0,
                    "--output-tokens-mean", OUTPUT, "--output-tokens-stddev", 0, "--random-seed", 1,
                    "--artifact-dir", place, *flags,
                    **variables,
                )  # fmt: skip
            except AssertionError:
                if attempt + 1 == ATTEMPTS or not cut_off(place):
                    raise
                continue
            (report,) = place.glob("*/profile_export_genai_perf.json")
            return json.loads(report.read_text())

    def test_benchmark_through_the_server(self, clients, server, demo_model, tmp_path):
        """Extra inputs would become tensors, so min_tokens cannot be set and some outputs may be too short."""
        flags = ("--backend", "vllm", "--endpoint-type", "kserve", "--url", server.grpc_url)
        check_streams(measured(self.profile(clients, demo_model, tmp_path, *flags)), least=1)
        idle(server)

    @pytest.mark.nightly
    def test_benchmark_through_the_gateway(self, clients, front, server, demo_model, tmp_path):
        flags = ("--endpoint-type", "chat", "--url", front.url, "--extra-inputs", "ignore_eos:true")
        check_streams(measured(self.profile(clients, demo_model, tmp_path, *flags)))
        idle(server)


def cut_off(place):
    """Return whether perf_analyzer's file exists but is not valid JSON."""
    for file in place.glob("*/profile_export.json"):
        try:
            json.loads(file.read_text())
        except ValueError:
            return True
    return False
