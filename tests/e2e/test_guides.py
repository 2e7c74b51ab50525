"""The commands in the documentation run as they are written, apart from ports, paths and the server's address.

A code block says in its first line whether it is run: `sh test` and `python test` run, `sh test background` is started
and stays until the end of the page, `sh skip: reason` does not run. The blocks of a page run in their order, against
the server with the demo model, or against the one that the page itself starts.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from paged_client.serving.tritonserver import choose_ports
from tests.support.gateway import gateway
from tests.support.triton import listens

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\S*)[ ]?(.*)\n((?:.*\n)*?)^```$", re.M)
SECONDS = 300  # limit of a block
EVENTS = '"enable_kv_cache_events": true, "endpoint": '
OTHER_PORTS = ("8100", "8101", "8102", "5557", "5558", "9000")  # of further servers, events, and a gateway or frontend
SLOW = ("docs/performance.md", "docs/guides/clients.md", "CONTRIBUTING.md")


class Block(NamedTuple):
    language: str
    mark: str  # the words after the language
    text: str

    @property
    def runs(self) -> bool:
        return self.mark in ("test", "test background")


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text())]


@dataclass(frozen=True)
class Place:
    """The addresses and directories that replace those in the commands of a page."""

    http: str
    grpc: str
    metrics: str
    gateway: int
    model: Path
    scratch: Path
    others: Mapping[str, int]  # for OTHER_PORTS

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables: `paged` is on the PATH, and curl fails if the server responds with an error."""
        (self.scratch / ".curlrc").write_text("fail\nmax-time = 120\n")
        paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]
        return os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "CURL_HOME": str(self.scratch),
        }

    def adapt(self, text: str) -> str:
        """Return the text of a block with these addresses and directories."""
        http, grpc, metrics = (address.rpartition(":")[2] for address in (self.http, self.grpc, self.metrics))
        text = text.replace("/tmp/", f"{self.scratch}/")  # replaced first, because other paths may lie there
        reach_server = r"paged (generate|chat|probe|map|profile|sleep|wake)\b(?!.*--url)"
        text = re.sub(reach_server, r"paged \1 --url localhost:8001", text)
        text = text.replace("localhost:8000", self.http).replace("localhost:8001", self.grpc)
        text = text.replace("localhost:8002", self.metrics)
        text = text.replace('"enable_kv_cache_events": true}', f'{EVENTS}"tcp://127.0.0.1:5557"}}')
        text = re.sub(rf"(?<=[: ])({'|'.join(OTHER_PORTS)})\b", lambda found: str(self.others[found[0]]), text)
        text = re.sub(r"(localhost:|--openai-port )8003", rf"\g<1>{self.gateway}", text)
        ports = f"--http-port {http} --grpc-port {grpc} --metrics-port {metrics}"
        text = text.replace("paged serve ", f"paged serve {ports} ")
        text = text.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
        return text.replace("/path/to/model", str(self.model))

    def command(self, block: Block) -> list[str]:
        if block.language == "python":
            return [sys.executable, "-c", self.adapt(block.text)]
        return ["bash", "-euo", "pipefail", "-c", self.adapt(block.text)]


def run(block: Block, place: Place) -> None:
    done = subprocess.run(
        place.command(block),
        cwd=ROOT,
        env=place.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{block.text}\nexited with {done.returncode}:\n{done.stdout}"


@contextmanager
def running(block: Block, place: Place) -> Iterator[None]:
    """Run a server, a gateway or a fleet, from its first response until Ctrl-C."""
    language, script = place.command(block)[:-1], place.command(block)[-1]
    assert len(script.strip().splitlines()) == 1, "a block in the background is one command"
    log = place.scratch / "background.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*language, f"exec {script}"], cwd=ROOT, env=place.environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + SECONDS
        while not _answers(script, place):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)


def _answers(script: str, place: Place) -> bool:
    """Return whether what a script runs is ready. A tritonserver and a frontend listen before they have a model."""
    ports = re.findall(r"--(?:openai-|frontend-)?port (\d+)", script)
    if not all(listens(int(port)) and _lists_models(port) for port in ports):
        return False
    if "paged serve" not in script:
        return True
    grpc = re.findall(r"--grpc-port (\d+)", script)[-1]
    probe = ["paged", "probe", "--url", f"localhost:{grpc}", "--timeout", "20"]
    return subprocess.run(probe, env=place.environment, cwd=ROOT, capture_output=True).returncode == 0


def _lists_models(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/v1/models", timeout=20) as answer:
            return bool(json.load(answer)["data"])
    except OSError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_runs_or_says_why_not(page):
    for block in blocks(page):
        if block.language in ("sh", "python"):
            assert block.runs or re.fullmatch(r"skip: \w.+", block.mark), f"neither test nor skip: {block}"
        else:
            assert block.language in ("", "text") and not block.mark, block


def starts_server(page: Path) -> bool:
    return any(block.runs and "paged serve" in block.text for block in blocks(page))


def page_parameter(page: Path) -> object:
    """Pages that start a server of their own, and those whose commands are slow, are run by `make nightly` only."""
    name = str(page.relative_to(ROOT))
    nightly = starts_server(page) or name in SLOW
    return pytest.param(page, id=name, marks=[pytest.mark.nightly] if nightly else [])


def reaches(page: Path) -> bool:
    """Return whether the commands of a page reach a server that runs before them."""
    return not starts_server(page) and any(
        "localhost" in block.text or "paged " in block.text for block in blocks(page) if block.runs
    )


RUN = [page for page in PAGES[1:] if any(block.runs for block in blocks(page))]
ALONE, REACHING = ([page_parameter(page) for page in RUN if reaches(page) == shared] for shared in (False, True))


def run_page(page: Path, addresses: list[str], model: Path, scratch: Path) -> None:
    """Run the commands of a page, and a gateway at the port that `make serve` gives it."""
    with ExitStack() as stack:
        if not starts_server(page) and any("localhost:8003" in block.text for block in blocks(page) if block.runs):
            port = stack.enter_context(gateway(addresses[1])).port
        else:
            (port,) = choose_ports(gateway=0)
        others = dict(zip(OTHER_PORTS, choose_ports(**{f"p{one}": 0 for one in OTHER_PORTS}), strict=True))
        place = Place(*addresses, gateway=port, model=model, scratch=scratch, others=others)
        for number, block in enumerate(one for one in blocks(page) if one.runs):
            (scratch / str(number)).mkdir()
            if block.mark == "test background":
                stack.enter_context(running(block, replace(place, scratch=scratch / str(number))))
            else:
                run(block, place)


def test_commands_of_the_readme(demo_server, tiny, tmp_path):
    """With a whole model: a chat without a limit ends when the model ends it."""
    run_page(PAGES[0], [demo_server.http_url, demo_server.grpc_url, demo_server.metrics_url], tiny[0], tmp_path)


@pytest.mark.parametrize("page", REACHING)
def test_commands_of_a_page(page, server, tiny, tmp_path):
    run_page(page, [server.http_url, server.grpc_url, server.metrics_url], tiny[0], tmp_path)


@pytest.mark.parametrize("page", ALONE)
def test_commands_of_a_page_that_reaches_no_server_or_starts_one(page, tiny, tmp_path):
    ports = choose_ports(http=0, grpc=0, metrics=0)
    run_page(page, [f"localhost:{port}" for port in ports], tiny[0], tmp_path)
