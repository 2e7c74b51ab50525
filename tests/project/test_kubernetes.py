"""The Helm chart of deploy/kubernetes, rendered by Helm and validated against the schemas of the Kubernetes API."""

import json
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from paged_backend.server.metrics.families import FAMILIES
from paged_client.cli import parse
from paged_client.serving.repository import check_options

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes"
CHART = FOLDER / "chart"
HELM = Path(sys.executable).with_name("helm")
VERSIONS = ("1.30", kubernetes_validate.latest_version())
EVERYTHING = {
    **{"autoscaling.enabled": True, "autoscaling.maxReplicas": 3, "podMonitor.enabled": True},
    **{"gateway.apiKeySecret": "keys", "networkPolicy.allowDownloads": True, "gpus": 2},
    **{"options.tensor_parallel_size": 2, "model": "Qwen/Qwen3-0.6B", "name": "chat"},
}
MINIMUM = {
    **{"gpus": 0, "gateway.enabled": False, "podDisruptionBudget.enabled": False, "networkPolicy.enabled": False},
    **{"gateway.retrySeconds": 0},
}
VARIANTS = {"defaults": {}, "everything": EVERYTHING, "minimum": MINIMUM}


def helm(*arguments):
    return subprocess.run([HELM, *arguments], cwd=FOLDER, capture_output=True, text=True)


def render(values):
    """Return the objects of the chart with these values."""
    flags = [part for name, value in values.items() for part in ("--set-json", f"{name}={json.dumps(value)}")]
    result = helm("template", "paged", "chart", *flags)
    assert result.returncode == 0, result.stderr
    return [one for one in yaml.safe_load_all(result.stdout) if one]


def rejection(**values):
    flags = [part for name, value in values.items() for part in ("--set-json", f"{name}={json.dumps(value)}")]
    result = helm("template", "paged", "chart", *flags)
    assert result.returncode != 0
    return result.stderr


def find(objects, kind, name="paged-server"):
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def container(objects, kind, name):
    (found,) = find(objects, kind, name)["spec"]["template"]["spec"]["containers"]
    return found


@pytest.fixture(scope="module", params=VARIANTS)
def objects(request):
    return render(VARIANTS[request.param])


@pytest.fixture(scope="module")
def everything():
    return render(EVERYTHING)


def test_helm_accepts_the_chart():
    result = helm("lint", "--strict", "chart")
    assert result.returncode == 0, result.stdout


def test_manifests_are_the_chart_with_its_defaults():
    assert (FOLDER / "manifests.yaml").read_text() == helm("template", "paged", "chart").stdout, (
        "run helm template paged chart > manifests.yaml in deploy/kubernetes"
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_match_the_schemas_of_the_api(objects, version):
    for one in objects:
        if one["kind"] != "PodMonitor":  # defined by the Prometheus operator, not by Kubernetes
            kubernetes_validate.validate(one, version, strict=True)


def test_commands_of_the_servers_are_valid(objects):
    made = container(objects, "StatefulSet", "paged-server")
    program, *arguments = made["args"]
    assert program == "paged"
    args = parse(arguments)
    assert (args.command, args.host) == ("serve", "0.0.0.0")
    options = dict(option.split("=", 1) for option in args.option)
    check_options({name: json.loads(value) for name, value in options.items()} | {"model": args.model})
    for probe in ("startupProbe", "livenessProbe"):
        program, *arguments = made[probe]["exec"]["command"]
        args = parse(arguments)
        assert args.command == "probe" and args.timeout < made[probe]["timeoutSeconds"]
    path = made["readinessProbe"]["httpGet"]["path"]
    assert path == f"/v2/models/{args.model}/ready"


@pytest.mark.parametrize(("kind", "name"), [("StatefulSet", "paged-server"), ("Deployment", "paged-gateway")])
def test_pods_run_as_the_user_of_the_image(everything, kind, name):
    pod = find(everything, kind, name)["spec"]["template"]["spec"]
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    user = pod["securityContext"]
    assert user["runAsNonRoot"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}\n" in dockerfile
    assert user["fsGroup"] == user["runAsGroup"], "the volumes are writable"
    mounts = [one["mountPath"] for one in pod["containers"][0].get("volumeMounts", ())]
    assert all("/root" not in path for path in mounts)


def test_the_gateway_has_the_address_of_every_server(everything):
    made = container(everything, "Deployment", "paged-gateway")
    args = parse(made["args"][1:])
    names = find(everything, "Service", "paged-servers")
    assert names["spec"]["clusterIP"] == "None"
    assert find(everything, "StatefulSet")["spec"]["serviceName"] == "paged-servers"
    assert args.url == [f"paged-server-{index}.paged-servers:8001" for index in range(3)]
    assert (args.host, args.model, args.retry_seconds) == ("0.0.0.0", "chat", 60.0)
    assert made["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "keys"}


def test_streams_may_end_before_a_server_is_killed(objects):
    spec = find(objects, "StatefulSet")["spec"]["template"]["spec"]
    (made,) = spec["containers"]
    pause = int(made["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > pause + 30 + 5  # tritonserver's exit timeout, and its end
    assert "must be above preStopSeconds + 35" in rejection(terminationGracePeriodSeconds=40)


def test_only_the_gateway_reaches_the_servers():
    """SECURITY.md: the server's ports have no users and no TLS."""
    policy = find(render({}), "NetworkPolicy")
    gateway, monitoring = policy["spec"]["ingress"]
    assert gateway["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert [port["port"] for port in gateway["ports"]] == ["grpc"]
    assert [port["port"] for port in monitoring["ports"]] == ["metrics"]
    assert {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]} == {53}
    allowed = find(render({"networkPolicy.allowDownloads": True}), "NetworkPolicy")
    assert {port["port"] for rule in allowed["spec"]["egress"] for port in rule["ports"]} == {53, 443}
    collector = {"to": [{"podSelector": {"matchLabels": {"app": "tempo"}}}], "ports": [{"port": 4318}]}
    traced = render({"networkPolicy.egress": [collector]})
    kubernetes_validate.validate(find(traced, "NetworkPolicy"), VERSIONS[0], strict=True)
    assert find(traced, "NetworkPolicy")["spec"]["egress"] == [*policy["spec"]["egress"], collector]
    labels = find(render({}), "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_without_sources_nothing_reaches_a_port():
    """A rule whose list of sources is empty would allow every source."""
    objects = render({"networkPolicy.clients": [], "networkPolicy.monitoring": []})
    (gateway,) = find(objects, "NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in gateway["ports"]] == ["grpc"]
    policy = find(objects, "NetworkPolicy", "paged-gateway")["spec"]
    assert "Ingress" in policy["policyTypes"] and not policy.get("ingress")
    (rule,) = find(render({"networkPolicy.monitoring": []}), "NetworkPolicy", "paged-gateway")["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {}}]


def test_scaling_reads_a_metric_of_the_engine(everything):
    scaler = find(everything, "HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    (rule,) = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert rule["seriesQuery"].partition("{")[0] in FAMILIES
    assert scaler["spec"]["scaleTargetRef"]["name"] == find(everything, "StatefulSet")["metadata"]["name"]
    assert "replicas" not in find(everything, "StatefulSet")["spec"]


def test_metrics_are_scraped_as_the_job_of_the_alerts(everything):
    monitor = find(everything, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = {
        port["name"]: port["containerPort"] for port in container(everything, "StatefulSet", "paged-server")["ports"]
    }
    assert ports[endpoint["port"]] == 8002
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "paged_llm"}]
    labels = find(everything, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    "values", [{"replica": 2}, {"replicas": 0}, {"gpus": -1}, {"name": "a b"}, {"model": ""}, {"shmSize": 1}], ids=str
)
def test_invalid_values_are_rejected_by_name(values):
    (name,) = values
    assert name in rejection(**values)


@pytest.mark.parametrize("size", ["1GB", "1 Gi", "-1Gi", "big"])
def test_the_size_of_shared_memory_is_a_quantity(size):
    assert "shmSize" in rejection(shmSize=size)


def test_unknown_engine_options_are_rejected_by_name():
    assert "max_modl_len" in rejection(**{"options.max_modl_len": 512})


def test_options_that_the_chart_sets_are_rejected():
    assert "options.model=/m: must not be an option; set the value model" in rejection(**{"options.model": "/m"})
    assert "set the value name" in rejection(**{"options.served_model_name": "chat"})


def test_the_least_number_of_servers_is_not_above_the_largest():
    bounds = {"autoscaling.minReplicas": 3, "autoscaling.maxReplicas": 2}
    reason = "autoscaling.minReplicas=3: must not be above autoscaling.maxReplicas=2"
    assert reason in rejection(**bounds, **{"autoscaling.enabled": True})


def test_several_gateways_have_a_disruption_budget():
    budget = find(render({}), "PodDisruptionBudget", "paged-gateway")["spec"]
    labels = find(render({}), "Deployment", "paged-gateway")["spec"]["template"]["metadata"]["labels"]
    assert budget["maxUnavailable"] == 1 and budget["selector"]["matchLabels"].items() <= labels.items()
    for values in ({"gateway.replicas": 1}, {"gateway.enabled": False}):
        budgets = [one for one in render(values) if one["kind"] == "PodDisruptionBudget"]
        assert [one["metadata"]["name"] for one in budgets] == ["paged-server"]


def test_a_busy_gateway_has_time_to_answer_its_liveness_probe():
    assert container(render({}), "Deployment", "paged-gateway")["livenessProbe"]["timeoutSeconds"] == 5


def test_gpus_are_a_limit_only_if_there_are_any():
    def limits(gpus):
        return container(render({"gpus": gpus}), "StatefulSet", "paged-server")["resources"]["limits"]

    assert limits(2)["nvidia.com/gpu"] == 2
    assert "nvidia.com/gpu" not in limits(0)
