"""Tests of docker-compose.yml, deploy/machines.yml and the Dockerfile."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from paged_backend.api.config import EngineConfig
from paged_backend.distributed.topology import Topology
from paged_client.cli import build_parser, parse

ROOT = Path(__file__).resolve().parents[2]
HOME = "/home/paged"  # of the image's user


@pytest.fixture(scope="module")
def service() -> dict:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["paged_llm"]


def _has_compose() -> bool:
    if not shutil.which("docker"):
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _has_compose(), reason="no docker client with the compose plugin")
@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/machines.yml"])
def test_docker_compose_file_is_valid(file):
    command = ["docker", "compose", "-f", file, "config", "--quiet"]
    environment = {**os.environ, "MODEL_DIRECTORY": "/m", "MASTER_ADDR": "10.0.0.1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_image_is_built_from_existing_files(service):
    assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    assert "nvcr.io/nvidia/tritonserver:26.07-py3" in dockerfile
    # The image brings a server of its own, whose Python stub takes numpy 2.
    assert "-c constraints-modern.txt -e '.[client,gguf,tracing,events,remote,dynamo]'" in dockerfile
    assert "server]" not in dockerfile


def test_gpu_is_reserved(service):
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]


def test_all_ports_are_published_on_this_machine_only(service):
    """A variable opens them."""
    gateway = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["openai"]
    ports = [*service["ports"], *gateway["ports"]]
    assert expanded(ports) == [f"127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002, 8003)]
    assert expanded(ports, LISTEN_ADDRESS="0.0.0.0")[0] == "0.0.0.0:8000:8000"


def test_image_runs_as_an_unprivileged_user_who_owns_its_caches():
    lines = (ROOT / "docker/Dockerfile").read_text().splitlines()
    user = lines.index("USER 1000:1000")
    assert not any(line.startswith(("RUN", "COPY")) for line in lines[user:])
    (install,) = [line for line in lines if line.startswith("RUN install --directory --owner=1000 --group=1000 ")]
    environment = dict(line.removeprefix("ENV ").split("=") for line in lines if line.startswith("ENV "))
    assert environment == {"HOME": HOME, "PAGED_CACHE_DIR": "$HOME/.cache/paged_llm"}
    assert {"$HOME", "$PAGED_CACHE_DIR", "$HOME/.triton/cache"} <= set(install.split())


def test_image_listens_in_its_container():
    (command,) = [line for line in (ROOT / "docker/Dockerfile").read_text().splitlines() if line.startswith("CMD ")]
    program, *arguments = json.loads(command.removeprefix("CMD "))
    args = parse(arguments)
    assert (program, args.command, args.model, args.host) == ("paged", "serve", "demo", "0.0.0.0")


def test_gateway_is_published_and_reaches_the_server(service):
    gateway = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["openai"]
    program, *arguments = gateway["command"]
    args = parse(arguments)
    assert (program, args.command, args.host, args.url) == ("paged", "openai", "0.0.0.0", "paged_llm:8001")
    assert [port.rpartition(":")[2] for port in gateway["ports"]] == [str(args.port)]
    assert gateway["image"] == service["image"]


def test_shared_memory_size(service):
    assert service["shm_size"] == "1g"


def test_health_check_generates_a_token(service):
    check = service["healthcheck"]
    command, program, *arguments = check["test"]
    assert (command, program) == ("CMD", "paged")
    args = build_parser()[0].parse_args(arguments)
    assert args.command == "probe"
    assert args.timeout < int(check["timeout"].rstrip("s"))


def test_model_is_a_directory_or_file_of_the_folder_that_is_mounted(service):
    def served(**variables):
        folder, mounted, _ = expanded(service["volumes"][:1], **variables)[0].split(":")
        args = parse(expanded(service["command"], **variables)[1:])
        assert (args.command, args.host, args.restart) == ("serve", "0.0.0.0", True)
        assert args.model.startswith(f"{mounted}/")
        return f"{folder}/{args.model.removeprefix(f'{mounted}/')}"

    assert served() == "./.cache/models/SmolLM2-135M-Instruct"
    assert served(MODEL_DIRECTORY="/data", MODEL="some.gguf") == "/data/some.gguf"


def test_compiled_kernels_are_kept_in_a_volume(service):
    name, directory = service["volumes"][1].split(":")
    assert name in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["volumes"]
    assert directory == f"{HOME}/.triton/cache"


def test_stop_grace_period_lets_streams_finish(service):
    assert int(service["stop_grace_period"].removesuffix("s")) > 30


def expanded(words, **variables):
    """Return the words as Docker Compose replaces the variables in them."""
    variable = re.compile(r"\$\{(\w+):([-?])([^}]*)\}")

    def value(match):
        name, kind, text = match.groups()
        assert name in variables or kind == "-", f"{name} is needed"
        return variables.get(name, text)

    return [variable.sub(value, word) for word in words]


def test_two_machines_run_the_ranks_of_one_model():
    services = yaml.safe_load((ROOT / "deploy/machines.yml").read_text())["services"]
    commands = {name: parse(expanded(one["command"], MASTER_ADDR="10.0.0.1")[1:]) for name, one in services.items()}
    server, worker = commands["server"], commands["worker"]
    topology = Topology.of(EngineConfig.from_options(server.engine_options | {"model": "m"}), {})
    assert (topology.num_nodes, topology.ranks_per_node) == (2, 1)
    assert (worker.master_addr, worker.master_port) == (topology.master_addr, topology.master_port)
    assert worker.node_rank == 1
    for name, one in services.items():
        assert one["profiles"] == [name]  # the profile chooses what a machine runs
        assert one["network_mode"] == "host"
        assert (ROOT / "deploy" / one["build"]["context"] / one["build"]["dockerfile"]).is_file()
