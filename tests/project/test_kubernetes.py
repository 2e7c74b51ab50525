"""The Helm chart of deploy/kubernetes, rendered by Helm and validated against the schemas of the Kubernetes API."""

import json
import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import jsonschema
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
DYNAMO = {"dynamo.enabled": True, "replicas": 2, "name": "chat", "podMonitor.enabled": True}
SPLIT = {
    **DYNAMO,
    **{"dynamo.prefillReplicas": 1, "options.remote_cache_url": "redis://cache:6379", "gpus": 2},
    **{"dynamo.worker.args": ["--tool-call-parser=hermes"], "imagePullSecrets": [{"name": "registry"}]},
}
VARIANTS = {"defaults": {}, "everything": EVERYTHING, "minimum": MINIMUM}
ALL_VARIANTS = VARIANTS | {"dynamo": DYNAMO, "dynamo, split": SPLIT, "dynamo, minimum": MINIMUM | DYNAMO}
LABELS = {"app.kubernetes.io/name": "paged-llm", "app.kubernetes.io/instance": "paged"}  # of all pods
# What Kubernetes has no schema of.
CUSTOM = {"PodMonitor", "DynamoGraphDeployment"}
GRAPH_SCHEMA = json.loads(Path(__file__).with_name("dynamo_graph_deployment.json").read_text())


def helm(*arguments):
    return subprocess.run([HELM, *arguments], cwd=FOLDER, capture_output=True, text=True)


def render(values):
    """Return the objects of the chart with these values."""
    return rendered(tuple(f"{name}={json.dumps(value)}" for name, value in values.items()))


@cache
def rendered(settings):
    flags = [part for setting in settings for part in ("--set-json", setting)]
    result = helm("template", "paged", "chart", *flags)
    assert result.returncode == 0, result.stderr
    return [one for one in yaml.load_all(result.stdout, yaml.CSafeLoader) if one]


def rejection(**values):
    flags = [part for name, value in values.items() for part in ("--set-json", f"{name}={json.dumps(value)}")]
    result = helm("template", "paged", "chart", *flags)
    assert result.returncode != 0
    return result.stderr


def find(objects, kind, name="paged-server"):
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def container(objects, name):
    containers = find(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    (found,) = [one for one in containers if one["name"] == name]
    return found


def components(objects):
    """Return the components of the DynamoGraphDeployment, by their names."""
    return {one["name"]: one for one in find(objects, "DynamoGraphDeployment", "paged")["spec"]["components"]}


def pod(component):
    return component["podTemplate"]["spec"]


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


@pytest.fixture(scope="module")
def split():
    return render(SPLIT)


@pytest.mark.parametrize("variant", ALL_VARIANTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_match_the_schemas_of_the_api(variant, version):
    for one in render(ALL_VARIANTS[variant]):
        if one["kind"] not in CUSTOM:
            kubernetes_validate.validate(one, version, strict=True)


def server_of(objects):
    """Return the server's container, of the StatefulSet or of the first workers."""
    if any(one["kind"] == "StatefulSet" for one in objects):
        return container(objects, "server")
    (made,) = pod(list(components(objects).values())[-1])["initContainers"]
    return made


@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_commands_of_the_servers_are_valid(variant):
    made = server_of(render(ALL_VARIANTS[variant]))
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


def check_user(spec):
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    user = spec["securityContext"]
    assert user["runAsNonRoot"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}\n" in dockerfile
    assert user["fsGroup"] == user["runAsGroup"], "the volumes are writable"
    for one in spec["containers"] + spec.get("initContainers", []):
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert all("/root" not in mount["mountPath"] for mount in one.get("volumeMounts", ()))


def test_pods_run_as_the_user_of_the_image(everything, split):
    check_user(find(everything, "StatefulSet")["spec"]["template"]["spec"])
    for component in components(split).values():
        check_user(pod(component))


def test_each_server_has_a_gateway_in_its_pod(everything):
    made = container(everything, "gateway")
    args = parse(made["args"][1:])
    assert {"name": "grpc", "containerPort": 8001} in container(everything, "server")["ports"]
    assert "--url=localhost:8001" in made["args"]
    assert (args.host, args.model, args.retry_seconds) == ("0.0.0.0", ["chat"], 60.0)
    assert made["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "keys"}
    service = find(everything, "Service", "paged-gateway")["spec"]
    labels = find(everything, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert [port["targetPort"] for port in service["ports"]] == [port["name"] for port in made["ports"]]
    without = render({"gateway.enabled": False})
    assert [one["name"] for one in find(without, "StatefulSet")["spec"]["template"]["spec"]["containers"]] == ["server"]
    assert "paged-gateway" not in [one["metadata"]["name"] for one in without]


def test_streams_may_end_before_a_server_is_killed(objects):
    spec = find(objects, "StatefulSet")["spec"]["template"]["spec"]
    for made in spec["containers"]:
        pause = int(made["lifecycle"]["preStop"]["exec"]["command"][1])
        assert spec["terminationGracePeriodSeconds"] > pause + 30 + 5  # tritonserver's exit timeout, and its end
    assert "must be above preStopSeconds + 35" in rejection(terminationGracePeriodSeconds=40)


def sources(policy):
    """Return the sources of each port in a policy, or of every port."""
    rules = policy["spec"].get("ingress", [])
    return {port["port"]: rule["from"] for rule in rules for port in rule.get("ports", [{"port": "every"}])}


def test_only_chosen_pods_reach_the_ports_of_the_servers():
    """SECURITY.md: the server's ports have no users and no TLS."""
    policy = find(render({}), "NetworkPolicy")
    assert sources(policy).keys() == {"openai", "metrics"}
    direct = [{"podSelector": {"matchLabels": {"app": "batch"}}}]
    opened = find(render({"networkPolicy.directClients": direct, "gateway.enabled": False}), "NetworkPolicy")
    assert {port: opened for port, opened in sources(opened).items() if port != "metrics"} == {
        "http": direct,
        "grpc": direct,
    }
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
    policy = find(render({"networkPolicy.clients": [], "networkPolicy.monitoring": []}), "NetworkPolicy")["spec"]
    assert "Ingress" in policy["policyTypes"] and not policy.get("ingress")
    (rule,) = find(render({"networkPolicy.monitoring": []}), "NetworkPolicy")["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": "openai"}]}


def test_with_dynamo_clients_reach_only_its_frontend():
    values = {"networkPolicy.clients": [{"podSelector": {"matchLabels": {"app": "web"}}}]}
    objects = render(DYNAMO | values)
    own = [{"podSelector": {"matchLabels": LABELS}}]
    server, frontend = find(objects, "NetworkPolicy"), find(objects, "NetworkPolicy", "paged-frontend")
    assert sources(server)["every"] == own and sources(server).keys() == {"every", "metrics", 9090}
    assert sources(frontend)["every"] == own and sources(frontend)[8000][0] == values["networkPolicy.clients"][0]
    for name, policy in (("worker", server), ("frontend", frontend)):
        labels = components(objects)[name]["podTemplate"]["metadata"]["labels"].items()
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels and LABELS.items() <= labels
        assert {"to": own} in policy["spec"]["egress"]


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
    ports = {port["name"]: port["containerPort"] for port in container(everything, "server")["ports"]}
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


def test_a_busy_gateway_has_time_to_answer_its_liveness_probe():
    assert container(render({}), "gateway")["livenessProbe"]["timeoutSeconds"] == 5


def test_gpus_are_a_limit_only_if_there_are_any():
    def limits(gpus):
        return container(render({"gpus": gpus}), "server")["resources"]["limits"]

    assert limits(2)["nvidia.com/gpu"] == 2
    assert "nvidia.com/gpu" not in limits(0)


@pytest.mark.parametrize("variant", [name for name in ALL_VARIANTS if name.startswith("dynamo")])
def test_graphs_match_the_schema_of_dynamo(variant):
    objects = render(ALL_VARIANTS[variant])
    assert not {"StatefulSet", "Service"} & {one["kind"] for one in objects}, "the operator creates them"
    jsonschema.validate(find(objects, "DynamoGraphDeployment", "paged"), GRAPH_SCHEMA)
    assert len(components(objects)) == len(find(objects, "DynamoGraphDeployment", "paged")["spec"]["components"])
    for name, component in components(objects).items():
        metadata = component["podTemplate"]["metadata"] | {"name": name}
        for version in VERSIONS:
            made = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod(component)}
            kubernetes_validate.validate(made, version, strict=True)
        (main,) = pod(component)["containers"]
        assert main["name"] == "main" and main["image"], "the operator adds its settings to it"


def test_schema_of_dynamo_rejects_other_fields():
    graph = deepcopy(find(render(DYNAMO), "DynamoGraphDeployment", "paged"))
    graph["spec"]["components"][0]["extraPodSpec"] = {}
    with pytest.raises(jsonschema.ValidationError, match="extraPodSpec"):
        jsonschema.validate(graph, GRAPH_SCHEMA)


def test_each_server_has_a_dynamo_worker_in_its_pod(split):
    for name, role in (("prefill", "prefill"), ("decode", "decode")):
        component = components(split)[name]
        assert (component["type"], component["replicas"]) == (name, SPLIT["replicas"] if name == "decode" else 1)
        (main,), (server,) = pod(component)["containers"], pod(component)["initContainers"]
        program, *arguments = [*main["command"], *main["args"]]
        assert program == "paged"
        args = parse(arguments)
        assert (args.command, args.url, args.model, args.role) == ("dynamo", ["localhost:8001"], ["chat"], role)
        assert args.tool_call_parser == "hermes"
        mounts = {one["name"]: one["mountPath"] for one in server["volumeMounts"]}
        assert {one["name"]: one["mountPath"] for one in main["volumeMounts"]}.items() <= mounts.items()
        assert server["restartPolicy"] == "Always", "it runs beside the worker, and ends after it"
        assert server["resources"]["limits"]["nvidia.com/gpu"] == 2
    (main,) = pod(components(render(DYNAMO))["worker"])["containers"]
    assert parse([*main["command"], *main["args"]][1:]).role == "aggregated"


def options_of(objects):
    made = [word for word in server_of(objects)["args"] if word.startswith("--option=")]
    return {name: json.loads(value) for name, value in (word.split("=", 2)[1:] for word in made)}


def test_servers_publish_events_for_a_router_that_uses_them():
    assert options_of(render(DYNAMO))["kv_events_config"] == {"enable_kv_cache_events": True}
    own = {"enable_kv_cache_events": True, "endpoint": "tcp://*:7000"}
    assert options_of(render(DYNAMO | {"options.kv_events_config": own}))["kv_events_config"] == own
    objects = render(DYNAMO | {"dynamo.routerMode": "round-robin"})
    assert "kv_events_config" not in options_of(objects)
    (main,) = pod(components(objects)["frontend"])["containers"]
    assert {"name": "DYN_ROUTER_MODE", "value": "round-robin"} in main["env"]
    assert "kv_events_config" not in options_of(render({}))


def test_the_image_has_the_runtime_of_the_chosen_dynamo():
    version = components(render(DYNAMO))["worker"]["runtimeVersionOverride"]
    assert f"ai-dynamo-runtime=={version}\n" in (ROOT / "constraints-modern.txt").read_text()
    frontend = components(render(DYNAMO | {"dynamo.version": "1.6.2"}))["frontend"]
    assert frontend["runtimeVersionOverride"] == "1.6.2"
    assert pod(frontend)["containers"][0]["image"].endswith(":1.6.2")


def test_combinations_that_dynamo_lacks_are_rejected():
    assert "autoscaling.enabled=true: must be false" in rejection(**DYNAMO, **{"autoscaling.enabled": True})
    assert "dynamo.prefillReplicas=1: needs options.remote_cache_url" in rejection(
        **DYNAMO, **{"dynamo.prefillReplicas": 1}
    )
    assert "version" in rejection(**{"dynamo.version": "latest"})
    assert "routerMode" in rejection(**{"dynamo.routerMode": "hash"})
