"""A real Prometheus for tests of the monitoring: Debian's package, which .ci/run unpacks."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paged_client.serving.ports import choose_ports
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
OBSERVE = ROOT / "deploy/observe"


def find_program(name: str) -> str | None:
    """Return the path of `prometheus` or `promtool`."""
    unpacked = ROOT / ".cache/prometheus/usr/bin" / name
    return shutil.which(name) or (str(unpacked) if unpacked.exists() else None)


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the data of a call of the HTTP API. An error of the query raises HTTPError."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}") as reply:
            return json.load(reply)["data"]

    def values(self, query: str) -> list[float]:
        """Return the current values of a query that are numbers."""
        values = [float(one["value"][1]) for one in self.get("query", query=query)["result"]]
        return [value for value in values if math.isfinite(value)]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready"):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False


@contextmanager
def running_prometheus(directory: Path, target: str) -> Iterator[Prometheus]:
    """Run Prometheus with the project's configuration, but for the target and shorter intervals."""
    binary = find_program("prometheus")
    assert binary
    config = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(OBSERVE / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = choose_ports(prometheus=0)
    command = [binary, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        made = Prometheus(f"http://127.0.0.1:{port}")
        until(made.is_ready, "Prometheus")
        yield made
    finally:
        process.terminate()
        process.wait()
