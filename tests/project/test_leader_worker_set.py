"""deploy/kubernetes/leader-worker-set.yaml: a model on several nodes. The object itself has no schema here."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from paged_backend.api.config import EngineConfig
from paged_backend.distributed.topology import Topology
from paged_client.cli import parse

FILE = Path(__file__).resolve().parents[2] / "deploy/kubernetes/leader-worker-set.yaml"
VERSIONS = ("1.30", kubernetes_validate.latest_version())
OBJECTS = list(yaml.safe_load_all(FILE.read_text()))
SPEC = OBJECTS[0]["spec"]["leaderWorkerTemplate"]
PODS = {role: SPEC[f"{role}Template"] for role in ("leader", "worker")}


def container(role):
    (found,) = PODS[role]["spec"]["containers"]
    return found


def arguments(role, **variables):
    """Return the parsed command of a pod, with the variables that Kubernetes replaces."""
    program, *words = container(role)["args"]
    assert program == "paged"
    for name, value in variables.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not any("$" in word for word in words)
    return parse(words)


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_and_other_objects_match_the_schemas_of_the_api(version):
    assert OBJECTS[0]["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    for one in OBJECTS[1:]:
        kubernetes_validate.validate(one, version, strict=True)
    for role, template in PODS.items():
        metadata = template["metadata"] | {"name": role}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_ranks_are_divided_over_the_pods_and_their_gpus():
    options = arguments("leader", POD_IP="10.0.0.1").engine_options
    topology = Topology.of(EngineConfig.from_options(options | {"model": "m"}), {})
    assert topology.num_nodes == SPEC["size"]
    for role in PODS:
        assert container(role)["resources"]["limits"]["nvidia.com/gpu"] == topology.ranks_per_node
    worker = arguments("worker", LWS_LEADER_ADDRESS="paged-group-0.paged-group.default", LWS_WORKER_INDEX="1")
    assert (worker.command, worker.node_rank, worker.master_port) == ("worker", 1, topology.master_port)


def test_only_pods_of_the_groups_reach_the_ranks():
    policies = {one["metadata"]["name"]: one["spec"] for one in OBJECTS if one["kind"] == "NetworkPolicy"}
    (rule,) = policies["paged-group-ranks"]["ingress"]
    assert "ports" not in rule
    for role, template in PODS.items():
        labels = template["metadata"]["labels"].items()
        assert policies["paged-group-ranks"]["podSelector"]["matchLabels"].items() <= labels
        assert rule["from"][0]["podSelector"]["matchLabels"].items() <= labels
        assert (policies["paged-group-clients"]["podSelector"]["matchLabels"].items() <= labels) == (role == "leader")
    ports = {port["name"]: port["containerPort"] for port in container("leader")["ports"]}
    opened = [port["port"] for rule in policies["paged-group-clients"]["ingress"] for port in rule["ports"]]
    assert sorted(opened) == sorted(ports)


def test_clients_reach_the_leaders_only():
    (service,) = [one for one in OBJECTS if one["kind"] == "Service"]
    selector = service["spec"]["selector"].items()
    assert selector <= PODS["leader"]["metadata"]["labels"].items()
    assert not selector <= PODS["worker"]["metadata"]["labels"].items()


def test_probes_generate_a_token():
    made = container("leader")
    for probe in ("startupProbe", "livenessProbe"):
        args = parse(made[probe]["exec"]["command"][1:])
        assert args.command == "probe" and args.timeout < made[probe]["timeoutSeconds"]
    assert made["readinessProbe"]["httpGet"]["path"] == f"/v2/models/{args.model}/ready"
    assert args.model == arguments("leader", POD_IP="10.0.0.1").name
