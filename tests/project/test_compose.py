"""Tests of docker-compose.yml and the Dockerfile."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from paged_client.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def service() -> dict:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["paged_llm"]


def _has_compose() -> bool:
    if not shutil.which("docker"):
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _has_compose(), reason="no docker client with the compose plugin")
def test_docker_compose_file_is_valid():
    result = subprocess.run(
        ["docker", "compose", "config", "--quiet"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_image_is_built_from_existing_files(service):
    assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    assert "nvcr.io/nvidia/tritonserver:26.07-py3" in dockerfile
    # The image brings a server of its own, whose Python stub takes numpy 2.
    assert "[client,tracing,events,remote,routing]" in dockerfile
    assert "server]" not in dockerfile
    assert "grep -v '^numpy=='" in dockerfile


def test_gpu_is_reserved(service):
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]


def test_all_ports_are_published(service):
    assert {port.split(":")[1] for port in service["ports"]} == {"8000", "8001", "8002"}


def test_shared_memory_size(service):
    assert service["shm_size"] == "1g"


def test_health_check_generates_a_token(service):
    check = service["healthcheck"]
    command, program, *arguments = check["test"]
    assert (command, program) == ("CMD", "paged")
    args = build_parser()[0].parse_args(arguments)
    assert args.command == "probe"
    assert args.timeout < int(check["timeout"].rstrip("s"))


def test_model_is_mounted_at_the_configured_path(service):
    model = json.loads((ROOT / "model_repository/paged_llm/1/model.json").read_text())["model"]
    assert service["volumes"][0].endswith(f":/opt/paged/{model}:ro")
    assert "WORKDIR /opt/paged\n" in (ROOT / "docker/Dockerfile").read_text()


def test_compiled_kernels_are_kept_in_a_volume(service):
    name, directory = service["volumes"][1].split(":")
    assert name in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["volumes"]
    assert directory == "/root/.triton/cache"
    assert "USER" not in (ROOT / "docker/Dockerfile").read_text()  # the cache is in the home of the image's user


def test_stop_grace_period_lets_streams_finish(service):
    assert int(service["stop_grace_period"].removesuffix("s")) > 30
