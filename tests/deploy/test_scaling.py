"""The manifests of what scales a fleet: valid by the schemas, a command that `launch` takes, rights that are enough and no more,
and metrics that there are."""

from typing import Any

import pytest

from common.ids import Role
from common.options import read_config
from launch.fleet_options import ScalingConfig
from launch.main import build_parser
from tests.deploy.test_dashboard import exposed, faults_of
from tests.deploy.test_kubernetes import KUSTOMIZATION, MANIFESTS, VERSIONS, Manifest, find, read
from tests.router.fakes import Site

AUTOSCALE, SCALED = read("autoscale.yaml"), read("scaledobjects.yaml")
OF_KUBERNETES = [each for each in (*AUTOSCALE, *SCALED) if each["kind"] != "ScaledObject"]


def of_kind(kind: str) -> Manifest:
    (found,) = [each for each in (*AUTOSCALE, *SCALED) if each["kind"] == kind]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_by_the_schemas_of_kubernetes(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in OF_KUBERNETES:
        kubernetes_validate.validate(manifest, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**of_kind("HorizontalPodAutoscaler"), "spec": {"colour": "red"}}, version, strict=True)


def config() -> ScalingConfig:
    (container,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    return read_config(ScalingConfig, build_parser().parse_args(container["args"]))


def test_the_command_asks_the_control_service_with_a_key_of_the_secret() -> None:
    ports = {port["name"]: port["port"] for port in find("Service", "tandem-control")["spec"]["ports"]}
    assert config().router == f"http://tandem-control:{ports['http']}" and config().scale == "kubernetes"
    (secret,) = KUSTOMIZATION["secretGenerator"]
    assert config().control_key.removeprefix("/keys/") in {file.removeprefix("keys/") for file in secret["files"]}


def test_the_account_may_do_what_is_asked_of_the_scales_of_the_two_workloads_and_nothing_else() -> None:
    (rule,) = of_kind("Role")["rules"]
    for role, path in (("prefill", config().kube_prefill), ("decode", config().kube_decode)):
        group, version, plural, name = path.split("/")
        workload = find("LeaderWorkerSet", f"tandem-{role}")
        assert workload["apiVersion"] == f"{group}/{version}" and workload["metadata"]["name"] == name
        assert rule["apiGroups"] == [group] and rule["resources"] == [f"{plural}/scale"] and name in rule["resourceNames"]
    assert rule["verbs"] == ["get", "update"], "GET and PUT"
    account = of_kind("ServiceAccount")["metadata"]["name"]
    assert of_kind("Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == account
    assert of_kind("RoleBinding")["subjects"][0]["name"] == account


@pytest.mark.anyio
async def test_keda_and_hpa_ask_for_metrics_that_there_are(site: Site) -> None:
    known = await exposed(site)
    objects = [each for each in SCALED if each["kind"] == "ScaledObject"]
    for each in objects:
        (trigger,) = each["spec"]["triggers"]
        query = trigger["metadata"]["query"]
        assert not faults_of(query, "", known), query
        role = each["metadata"]["name"].removeprefix("tandem-")
        assert f'role="{role}"' in query
    (external,) = (each["external"]["metric"] for each in of_kind("HorizontalPodAutoscaler")["spec"]["metrics"])
    assert known[external["name"]].labels >= set(external["selector"]["matchLabels"])


def test_what_is_scaled_are_the_workloads_and_not_below_one_instance() -> None:
    for each in SCALED:
        spec: dict[str, Any] = each["spec"]
        target = spec["scaleTargetRef"]
        workload = find(target["kind"], target["name"])
        assert workload["apiVersion"] == target["apiVersion"] and workload in MANIFESTS
        assert spec.get("minReplicaCount", spec.get("minReplicas")) == 1
    least: dict[Role, int] = {"prefill": config().min_prefill, "decode": config().min_decode}
    assert min(least.values()) == 1
