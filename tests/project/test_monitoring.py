"""The dashboards and rules of deploy/observe, with a real Prometheus that reads a real server under load."""

import json
import re
import subprocess
import threading

import pytest
import yaml

from deploy.observe.dashboards import DASHBOARDS, DIRECTORY, filled_in, to_json
from paged_client import Client
from paged_client.serving.tritonserver import TritonServer
from tests.support.processes import needs_server
from tests.support.prometheus import OBSERVE, ROOT, find_program, running_prometheus
from tests.support.waiting import until

needs_prometheus = pytest.mark.skipif(not find_program("prometheus"), reason="no Prometheus; .ci/run unpacks it")
OPTIONS = {
    **{"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 4},
    **{"num_speculative_tokens": 2, "swap_space": "1MiB", "preemption_mode": "swap"},
}
REPEATED = {"logit_bias": {"65": 100}}  # an output of one token, which prompt lookup guesses
METRIC = re.compile(r"\b(?:(?:paged_|nv_)\w+|(?:vllm|paged):[\w:]+|up)(?=[\s{\[)]|$)")
RULES = [rule for group in yaml.safe_load((OBSERVE / "rules.yml").read_text())["groups"] for rule in group["rules"]]
QUERIES = {
    f"{dashboard.title}, {panel.title}, {legend}": query
    for dashboard in DASHBOARDS
    for panel in dashboard.panels
    for legend, query in panel.queries.items()
}


@pytest.fixture(scope="module")
def prometheus(tiny, tmp_path_factory):
    """A Prometheus that reads a server under load. All requests share a prompt."""
    directory = tmp_path_factory.mktemp("prometheus")
    stopping = threading.Event()

    def load() -> None:
        with Client(server.grpc_url) as client:
            while not stopping.is_set():
                client.generate("Once upon a time " * 2, max_tokens=16, ignore_eos=True, **REPEATED)

    options = OPTIONS | {"disk_cache_dir": str(directory / "disk")}
    with TritonServer(tiny[0], options, engine_only=True) as server:
        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            with running_prometheus(directory, server.metrics_url) as made:
                yield made
        finally:
            stopping.set()
            for thread in threads:
                thread.join()


def test_every_metric_of_a_query_or_alert_exists():
    """It is in the reference, which is generated from the code."""
    documented = set(re.findall(r"[\w:]+", (ROOT / "docs/reference/metrics.md").read_text()))
    known = documented | {f"{name}_{end}" for name in documented for end in ("bucket", "count", "sum")}
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    expressions = [*QUERIES.values(), *(rule["expr"] for rule in RULES)]
    used = {name for one in expressions for name in METRIC.findall(one)}
    assert used - known - recorded == set()


@pytest.mark.nightly
@needs_server
@needs_prometheus
@pytest.mark.parametrize("name", QUERIES)
def test_every_query_of_a_panel_returns_data(prometheus, name):
    query = filled_in(QUERIES[name], "2m")
    assert "$" not in query
    until(lambda: prometheus.values(query), f"data of {query}")


@pytest.mark.nightly
@needs_server
@needs_prometheus
@pytest.mark.parametrize("name", [rule["record"] for rule in RULES if "record" in rule])
def test_every_recording_rule_returns_data(prometheus, name):
    until(lambda: prometheus.values(name), f"data of {name}")


@pytest.mark.nightly
@needs_server
@needs_prometheus
@pytest.mark.parametrize("alert", [rule["alert"] for rule in RULES if "alert" in rule])
def test_every_metric_of_an_alert_has_data(prometheus, alert):
    (rule,) = (rule for rule in RULES if rule.get("alert") == alert)
    names = METRIC.findall(rule["expr"])
    assert names
    for name in names:
        until(lambda name=name: prometheus.values(name), f"data of {name}")


@pytest.mark.nightly
@needs_server
@needs_prometheus
def test_rules_evaluate_without_errors_and_no_alert_fires(prometheus):
    def evaluated():
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] == "ok" for rule in evaluated()), "the first evaluation of the rules")
    assert {rule["name"] for rule in evaluated()} == {rule.get("record") or rule["alert"] for rule in RULES}
    assert [alert for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"] == []


@pytest.mark.skipif(not find_program("promtool"), reason="no promtool; .ci/run unpacks it")
@pytest.mark.parametrize("command", [["test", "rules", "rules_test.yml"], ["check", "config", "prometheus.yml"]])
def test_promtool_accepts_rules_and_configuration(command):
    result = subprocess.run([find_program("promtool"), *command], cwd=OBSERVE, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_unit_test():
    tested = {
        test["alertname"]
        for group in yaml.safe_load((OBSERVE / "rules_test.yml").read_text())["tests"]
        for test in group.get("alert_rule_test", [])
    }
    assert tested == {rule["alert"] for rule in RULES if "alert" in rule}


def test_dashboard_files_are_up_to_date():
    assert {file.name: file.read_text() for file in DIRECTORY.glob("*.json")} == {
        f"{dashboard.uid}.json": to_json(dashboard) for dashboard in DASHBOARDS
    }, "run python deploy/observe/dashboards.py"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_panels_do_not_overlap(dashboard):
    places = [panel["gridPos"] for panel in json.loads(to_json(dashboard))["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_dashboards_are_provisioned():
    """The paths in Grafana's provisioning are those that docker compose mounts."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    for source in mounts:
        assert (ROOT / source).is_dir()
    (provider,) = yaml.safe_load((OBSERVE / "grafana/provisioning/dashboards/paged.yml").read_text())["providers"]
    assert mounts["./deploy/observe/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./deploy/observe/grafana/provisioning"] == "/etc/grafana/provisioning"
    (source,) = yaml.safe_load((OBSERVE / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    mounts = dict(volume.split(":")[:2] for volume in services["prometheus"]["volumes"])
    for name in ("prometheus.yml", "rules.yml"):
        assert mounts[f"./deploy/observe/{name}"] == f"/etc/prometheus/{name}"
    (job,) = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["paged_llm:8002"]
    assert any(port.endswith(":8002:8002") for port in services["paged_llm"]["ports"])


@pytest.mark.parametrize("service", ["prometheus", "grafana"])
def test_monitoring_is_optional_and_local(service):
    settings = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][service]
    assert settings["profiles"] == ["observe"]
    assert all(port.startswith("127.0.0.1:") for port in settings["ports"])
