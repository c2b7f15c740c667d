"""Dashboards, alert rules, the compose file and the Helm chart: they parse, name metrics that exist, and say what `launch` takes.

Helm and promtool are asked where they are installed; without them their tests are skipped.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.commands import calls_of, read_command
from tests.deploy.test_kubernetes import PREFILL_0, VERSIONS

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm/tandem"
FILES = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.suffix in (".json", ".yaml", ".tpl")]
TEMPLATES = [path for path in FILES if path.parent == CHART / "templates"]
EVERYTHING = (
    "keys.existingSecret=keys,routers.count=2,gateway.parentRefs[0].name=public,gateway.hostnames[0]=llm.example.com,routers.accessLog=true,routers.otlpEndpoint=http://tempo:4318,autoscale.enabled=true,"
    "monitoring.serviceMonitor=true,monitoring.prometheusRule=true,monitoring.dashboards=true,prefill.pods=2,prefill.tp=16"
)
MADE = "keys.cluster=c,keys.control=d,keys.api=alice 0123456789abcdef"


def name_of(path: Path) -> str:
    return path.relative_to(DEPLOY).as_posix()


@pytest.mark.parametrize("path", [path for path in FILES if path not in TEMPLATES], ids=name_of)
def test_every_file_parses(path: Path) -> None:
    text = path.read_text()
    assert json.loads(text) if path.suffix == ".json" else list(yaml.safe_load_all(text))


def test_every_metric_that_a_file_names_exists() -> None:
    page = (DEPLOY.parent / "docs/reference/metrics.md").read_text()
    known = set[str]()
    for name, kind in re.findall(r"\*\*`(tandem_\w+)`\*\* \((\w+)", page):
        known |= {f"{name}{suffix}" for suffix in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    named = {name: path for path in FILES for name in re.findall(r"\btandem_[a-z]\w+", path.read_text())}
    assert len(named) > 40
    assert not {name: name_of(path) for name, path in named.items() if name not in known}


def test_every_dashboard_is_in_the_chart_and_in_the_kustomization() -> None:
    boards = {path.name for path in (DEPLOY / "grafana").glob("*.json")}
    (generated,) = yaml.safe_load((DEPLOY / "grafana/kustomization.yaml").read_text())["configMapGenerator"]
    linked = {path.name: path.resolve() for path in (CHART / "files").iterdir()}
    assert boards == set(generated["files"]) == linked.keys() - {"rules.yaml"}
    assert linked == {name: DEPLOY / ("prometheus" if name == "rules.yaml" else "grafana") / name for name in linked}


def test_what_compose_starts_is_a_command_and_the_files_that_it_names_are_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    words = [word.replace("${MODEL:-demo}", "demo") for word in compose["services"]["tandem"]["command"]]
    from launch.main import build_parser

    flags = build_parser().parse_args(words)
    tempo = yaml.safe_load((DEPLOY / "compose/tempo.yaml").read_text())
    assert flags.otlp_endpoint == f"http://{tempo['distributor']['receivers']['otlp']['protocols']['http']['endpoint']}"
    texts = [path.read_text() for path in FILES if path.parent.is_relative_to(DEPLOY / "compose")]
    named = {name for text in texts for name in re.findall(r"/etc/tandem/([\w./-]+)", text)}
    assert named and all((DEPLOY / name).exists() for name in named)
    assert all(service["network_mode"] == "host" for service in compose["services"].values())
    for service in compose["services"].values():
        named_volumes = {volume.partition(":")[0] for volume in service["volumes"]} - {"..", "${MODELS"}
        assert named_volumes <= compose["volumes"].keys()
    assert f"tempo:{Path(tempo['storage']['trace']['wal']['path']).parent}" in compose["services"]["tempo"]["volumes"]


def test_grafana_is_given_the_data_that_its_dashboards_ask_for_where_compose_serves_it() -> None:
    """Each dashboard has a variable for its source, whose first choice is the one that is the default."""
    provisioning = DEPLOY / "compose/provisioning"
    sources = yaml.safe_load((provisioning / "datasources/tandem.yaml").read_text())["datasources"]
    (default,) = [source["type"] for source in sources if source.get("isDefault")]
    services = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]
    tempo = yaml.safe_load((DEPLOY / "compose/tempo.yaml").read_text())["server"]
    (listens,) = [word.partition("=")[2] for word in services["prometheus"]["command"] if "listen-address" in word]
    serves = {"prometheus": listens, "tempo": f"{tempo['http_listen_address']}:{tempo['http_listen_port']}"}
    assert {source["type"]: source["url"] for source in sources} == {name: f"http://{at}" for name, at in serves.items()}
    (provider,) = yaml.safe_load((provisioning / "dashboards/tandem.yaml").read_text())["providers"]
    boards = sorted((DEPLOY / provider["options"]["path"].removeprefix("/etc/tandem/")).glob("*.json"))
    assert services["grafana"]["environment"]["GF_PATHS_PROVISIONING"] == "/etc/tandem/compose/provisioning" and len(boards) == 3
    for board in map(json.loads, (path.read_text() for path in boards)):
        (variable,) = board["templating"]["list"]
        assert (variable["type"], variable["query"]) == ("datasource", default)
        asked = {each["datasource"]["uid"] for each in board["panels"] if each["type"] != "row"}
        assert asked == {f"${{{variable['name']}}}"}


def test_the_chart_reads_the_values_that_it_has() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = "".join(path.read_text() for path in TEMPLATES)
    read = set(re.findall(r"\.Values((?:\.\w+)+)", text)) | {
        f".{role}.{name}" for role in ("prefill", "decode") for name in re.findall(r"\$values\.(\w+)", text)
    }
    there = {f".{name}.{inner}" for name, of in values.items() if isinstance(of, dict) for inner in of}
    there |= {f".{name}" for name, of in values.items() if not isinstance(of, dict)}
    assert read == there


# --- with the tools ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_docker_compose_takes_its_file(tmp_path: Path) -> None:
    """Also its first version, which only does not know that a file may name its project."""
    text = (DEPLOY / "compose/compose.yaml").read_text().replace("\nname: tandem\n", "\n")
    (tmp_path / "compose.yaml").write_text(text)
    for words in (["config", "--quiet"], ["--profile=tandem", "config", "--services"]):
        done = subprocess.run(["docker-compose", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"prometheus", "tempo", "grafana", "tandem"}


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_has_the_flags_that_compose_gives_it() -> None:
    service = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]["prometheus"]
    known = subprocess.run(["prometheus", "--help"], capture_output=True, text=True, timeout=60)
    for word in service["command"]:
        assert f"{word.partition('=')[0]}=" in known.stdout + known.stderr, word


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_its_configuration_and_its_rules_which_fire_as_they_say() -> None:
    for words in (
        ["check", "config", str(DEPLOY / "compose/prometheus.yaml")],
        ["test", "rules", str(DEPLOY / "prometheus/rules_test.yaml")],
    ):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def rendered(*settings: str) -> list[dict[str, Any]]:
    words = ["helm", "template", "tandem", str(CHART), *(word for each in settings for word in ("--set", each))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest is not None]


def pods(manifests: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in manifests:
        if each["kind"] == "Deployment":
            yield each["metadata"]["name"], each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            yield each["metadata"]["name"], each["spec"]["leaderWorkerTemplate"]["workerTemplate"]


needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")


@needs_helm
@pytest.mark.parametrize("settings", [EVERYTHING, MADE])
@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_chart_renders_is_valid_by_the_schemas_of_kubernetes(settings: str, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    manifests = rendered(settings)
    theirs = ("leaderworkerset.x-k8s.io", "monitoring.coreos.com", "gateway.networking.k8s.io")
    for manifest in manifests:
        if not manifest["apiVersion"].startswith(theirs):
            kubernetes_validate.validate(manifest, version, strict=True)
    for name, template in pods(manifests):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
        kubernetes_validate.validate(pod, version, strict=True)
        assert template["spec"]["enableServiceLinks"] is False


@needs_helm
def test_the_charts_pods_start_commands_of_launch_and_meet_at_every_router(programs: Path) -> None:
    manifests = rendered(EVERYTHING)
    found = dict(pods(manifests))
    services = {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == "Service"}
    for number in range(2):
        (container,) = found[f"tandem-router-{number}"]["spec"]["containers"]
        router = read_command(container["args"])
        assert (router.router.access_log, router.router.otlp_endpoint) == ("on", "http://tempo:4318")
        chosen = services[f"tandem-router-{number}"]["selector"].items()
        assert [name for name, pod in found.items() if chosen <= pod["metadata"]["labels"].items()] == [f"tandem-router-{number}"]
    for role, tp in (("prefill", 16), ("decode", 8)):
        (container,) = found[f"tandem-{role}"]["spec"]["containers"]
        environment = {each["name"]: each["value"] for each in container["env"] if "value" in each} | PREFILL_0
        path = {"PATH": f"{programs}:{os.environ['PATH']}", "LWS_WORKER_INDEX": "0"}
        subprocess.run([*container["command"], *container["args"]], env=environment | path, check=True, timeout=60)
        instance = read_command(calls_of(programs)[-1]).instance
        assert (instance.tp, len(instance.ranks), instance.name) == (tp, 8, f"{role}-0")
        assert instance.routers == ("tcp://tandem-router-0:8001", "tcp://tandem-router-1:8001")
        grace_s = found[f"tandem-{role}"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > 60 and "--within-s=60" in container["lifecycle"]["preStop"]["exec"]["command"][-1]
    (autoscale,) = found["tandem-autoscale"]["spec"]["containers"]
    from launch.main import build_parser

    assert build_parser().parse_args(autoscale["args"]).scale == "kubernetes"


@needs_helm
def test_the_charts_keys_are_a_secret_that_only_root_reads_and_must_be_given() -> None:
    manifests = rendered(MADE)
    (secret,) = [each for each in manifests if each["kind"] == "Secret"]
    assert secret["stringData"].keys() == {"cluster.key", "control.key", "api.keys"}
    for _, template in pods(manifests):
        (volume,) = [volume["secret"] for volume in template["spec"]["volumes"] if "secret" in volume]
        assert volume == {"secretName": secret["metadata"]["name"], "defaultMode": 0o400}
    with pytest.raises(AssertionError, match=r"give keys\.existingSecret"):
        rendered("routers.count=1")


@needs_helm
def test_what_an_operator_adds_reaches_the_pods_and_is_valid() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    added = "image.pullSecrets[0].name=registry,model.claim=,model.tokenSecret=hf"
    for role in ("prefill", "decode"):
        added += f",{role}.env[0].name=NCCL_DEBUG,{role}.env[0].value=INFO,{role}.cacheClaim=kernels,{role}.podAnnotations.a=b"
        added += f",{role}.extraVolumes[0].name=more,{role}.extraVolumeMounts[0].name=more"
        added += f",{role}.extraVolumeMounts[0].mountPath=/more"
    manifests = rendered(MADE, added)
    (budget,) = [each for each in manifests if each["kind"] == "PodDisruptionBudget"]
    for version in VERSIONS:
        kubernetes_validate.validate(budget, version, strict=True)
    found = dict(pods(manifests))
    for name, template in found.items():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
        kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    for role in ("prefill", "decode"):
        template = found[f"tandem-{role}"]
        (container,) = template["spec"]["containers"]
        assert {"HF_TOKEN", "NCCL_DEBUG"} <= {each["name"] for each in container["env"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "kernels"}
        assert "models" not in volumes and "more" in volumes
        assert "/more" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert template["metadata"]["annotations"] == {"a": "b"}


@needs_helm
def test_a_gateway_that_is_named_leads_what_is_for_clients_to_the_routers_service() -> None:
    manifests = rendered(EVERYTHING)
    (route,) = [each["spec"] for each in manifests if each["kind"] == "HTTPRoute"]
    (rule,) = route["rules"]
    ports = {each["metadata"]["name"]: each["spec"]["ports"] for each in manifests if each["kind"] == "Service"}
    (behind,) = rule["backendRefs"]
    assert [port["targetPort"] for port in ports[behind["name"]] if port["port"] == behind["port"]] == ["http"]
    assert (route["parentRefs"], route["hostnames"], rule["timeouts"]) == (
        [{"name": "public"}],
        ["llm.example.com"],
        {"request": "0s"},
    )
    assert [match["path"] for match in rule["matches"]] == [{"type": "PathPrefix", "value": "/v1"}]
    assert not [each for each in rendered(MADE) if each["kind"] == "HTTPRoute"]


@needs_helm
def test_the_chart_scrapes_every_router_as_one_job_and_its_rules_are_those_of_prometheus() -> None:
    manifests = rendered(EVERYTHING)
    services = [each["metadata"]["labels"] for each in manifests if each["kind"] == "Service"]
    for monitor in (each["spec"] for each in manifests if each["kind"] == "ServiceMonitor"):
        (labels,) = [labels for labels in services if monitor["selector"]["matchLabels"].items() <= labels.items()]
        assert labels[monitor["jobLabel"]] == "tandem"
    (rule,) = [each for each in manifests if each["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())
    (boards,) = [each["data"] for each in manifests if each["kind"] == "ConfigMap"]
    assert {name: json.loads(text) for name, text in boards.items()} == {
        path.name: json.loads(path.read_text()) for path in (DEPLOY / "grafana").glob("*.json")
    }
