"""The Kubernetes manifests: valid by the schemas, commands that `launch` takes, and names that fit together."""

import asyncio
import copy
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from common.access import Access, KeyRing
from common.addresses import port_of
from common.ids import InstanceId
from common.instance.requests import LAST_S
from common.messages import Drain, Goodbye
from common.options import read_config
from launch.fleet_page import DrainFlags
from launch.main import build_parser
from launch.settings import settle
from tests.deploy.commands import Command, calls_of, read_command, write_program
from tests.router.calls import get, until
from tests.router.fakes import EchoFleet, Site, listening

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
VERSIONS = ("1.29", "1.37")
"""The oldest and the newest that are meant."""
ROLES = ("prefill", "decode")
CLOSING_S = 10.0
"""An instance closes within this, or ends anyway."""
PREFILL_0 = {"HOST_IP": "10.0.0.2", "GROUP": "0", "LWS_LEADER_ADDRESS": "tandem-prefill-0.tandem-prefill.tandem"}

Manifest = dict[str, Any]


def read(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


KUSTOMIZATION = read("kustomization.yaml")[0]
MANIFESTS = [manifest for name in KUSTOMIZATION["resources"] if name.endswith(".yaml") for manifest in read(name)]
SETTINGS = dict(line.split("=", 1) for line in KUSTOMIZATION["configMapGenerator"][0]["literals"])


def find(kind: str, name: str) -> Manifest:
    (found,) = [manifest for manifest in MANIFESTS if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)]
    return found


def pods() -> Iterator[tuple[str, Manifest]]:
    """Every kind of pod, as a PodTemplateSpec, with its name."""
    yield "router", find("Deployment", "tandem-router")["spec"]["template"]
    for role in ROLES:
        yield role, find("LeaderWorkerSet", f"tandem-{role}")["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def valid_kinds() -> list[Manifest]:
    """What Kubernetes itself has schemas for. A LeaderWorkerSet is none of its kinds, but its pods are: as a PodTemplate."""
    known = [manifest for manifest in MANIFESTS if manifest["kind"] in ("Deployment", "Service")]
    templates = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": f"tandem-{name}"}, "template": template}
        for name, template in pods()
    ]
    return known + templates


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_by_the_schemas_of_kubernetes(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in valid_kinds():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_no_pod_gets_variables_of_services_which_would_be_taken_for_flags() -> None:
    (autoscale,) = [each["spec"]["template"] for each in read("autoscale.yaml") if each["kind"] == "Deployment"]
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in (autoscale, *dict(pods()).values()))


def test_the_example_of_a_config_map_is_valid_and_gives_a_pod_its_flags(tmp_path: Path) -> None:
    page = (FOLDER.parents[1] / "docs/operate/configuration.md").read_text()
    maps_and_pod = list(yaml.safe_load_all(page.partition("```yaml\n")[2].partition("```")[0]))
    files, variables, pod = maps_and_pod
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in maps_and_pod:
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    (container,) = pod["spec"]["containers"]
    (source,), (mount,), (volume,) = container["envFrom"], container["volumeMounts"], pod["spec"]["volumes"]
    assert source["configMapRef"]["name"] == variables["metadata"]["name"] and mount["name"] == volume["name"]
    assert volume["configMap"]["name"] == files["metadata"]["name"]
    environment = {source["prefix"] + name: text for name, text in variables["data"].items()}
    assert environment["TANDEM_CONFIG"] == f"{mount['mountPath']}/fleet.toml"
    (tmp_path / "fleet.toml").write_text(files["data"]["fleet.toml"])
    environment |= {"TANDEM_CONFIG": str(tmp_path / "fleet.toml"), "TANDEM_HOST": "10.0.0.3"}
    parser = build_parser()
    flags = parser.parse_args(container["args"])
    settle(parser, flags, environment)
    command = Command("decode", flags)
    assert (command.instance.host, command.instance.drain_timeout_s, flags.max_running) == ("10.0.0.3", 30.0, 512)
    assert (flags.model, flags.cluster_key) == ("/models/Qwen3-32B", "/keys/cluster.key")


@pytest.mark.parametrize("kind", ["Deployment", "Service", "PodTemplate"])
def test_a_wrong_word_in_a_manifest_is_found(kind: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    manifest = next(copy.deepcopy(manifest) for manifest in valid_kinds() if manifest["kind"] == kind)
    (manifest["template"]["spec"] if kind == "PodTemplate" else manifest["spec"])["colour"] = "red"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


def router_command() -> Command:
    (container,) = find("Deployment", "tandem-router")["spec"]["template"]["spec"]["containers"]
    words = list(container["args"])
    for name, value in SETTINGS.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not any("$(" in word for word in words)
    return read_command(words)


def instance_command(role: str, programs: Path, **environment: str) -> Command:
    """What a pod of the role runs, with the environment that Kubernetes and LeaderWorkerSet give it."""
    (container,) = dict(pods())[role]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    given = {**variables, **SETTINGS, **PREFILL_0, **environment, "PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run([*container["command"], *container["args"]], env=given, check=True, timeout=60)
    (words,) = calls_of(programs)
    return read_command(words)


def test_the_routers_ports_are_those_that_the_services_and_the_instances_ask_for(programs: Path) -> None:
    router = router_command().router
    (container,) = find("Deployment", "tandem-router")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": router.port, "control": router.control_port}
    services = {
        name: {port["name"]: port for port in find("Service", name)["spec"]["ports"]} for name in ("tandem", "tandem-control")
    }
    assert all(port["targetPort"] in ports for each in services.values() for port in each.values())
    control = services["tandem-control"]["control"]["port"]
    assert instance_command("prefill", programs, LWS_WORKER_INDEX="0").instance.routers == (f"tcp://tandem-control:{control}",)


def test_instances_reach_a_router_that_is_not_ready_which_it_becomes_by_them() -> None:
    assert find("Service", "tandem-control")["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in find("Service", "tandem")["spec"]


@pytest.mark.parametrize("role", ROLES)
def test_the_pod_of_an_instance_starts_all_its_ranks(role: str, programs: Path) -> None:
    command = instance_command(role, programs, LWS_WORKER_INDEX="0")
    assert command.role == role and command.flags.name == f"{role}-0" and command.flags.host == "10.0.0.2"
    assert len(command.instance.ranks) == command.instance.tp == 8


@pytest.mark.parametrize("number", [0, 1])
def test_the_pods_of_an_instance_start_their_parts_of_the_ranks_and_meet_at_the_first(number: int, programs: Path) -> None:
    instance = instance_command("prefill", programs, LWS_WORKER_INDEX=str(number), TP="16").instance
    assert instance.ranks == range(8 * number, 8 * number + 8)
    assert re.fullmatch(r"tcp://tandem-prefill-0\.tandem-prefill\.tandem:81\d\d", instance.leader)


def test_every_group_has_a_port_of_its_own_for_its_ranks_because_groups_may_share_a_host(programs: Path) -> None:
    leaders = set()
    for role, group in product(ROLES, ("0", "1", "99")):
        instance = instance_command(role, programs, LWS_WORKER_INDEX="0", TP="16", GROUP=group).instance
        leaders.add(port_of(instance.leader))
        (programs / "calls").unlink()
    assert len(leaders) == 6


@pytest.mark.anyio
async def test_an_instance_is_ready_when_the_router_says_that_it_is_up(site: Site, programs: Path) -> None:
    text = (await get(site, "/metrics")).text.replace('"p0"', '"prefill-0"')
    write_program(programs / "curl", f"cat {programs}/metrics")
    (container,) = dict(pods())["prefill"]["spec"]["containers"]

    def is_ready(metrics: str, group: str) -> bool:
        (programs / "metrics").write_text(metrics)
        environment = {"GROUP": group, "PATH": f"{programs}:{os.environ['PATH']}"}
        return subprocess.run(container["readinessProbe"]["exec"]["command"], env=environment, timeout=60).returncode == 0

    up = 'tandem_instance_up{instance="prefill-0",role="prefill"} '
    assert is_ready(text, "0") and not is_ready(text, "1") and not is_ready("", "0")
    assert not is_ready(text.replace(f"{up}1", f"{up}0"), "0"), "it drains or is stuck"
    assert is_ready(text.replace('role="prefill"', 'role="decode"'), "0"), "it has taken another role"


def pre_stop(role: str) -> list[str]:
    (container,) = dict(pods())[role]["spec"]["containers"]
    command: list[str] = container["lifecycle"]["preStop"]["exec"]["command"]
    return command


def drain_flags(role: str, programs: Path) -> DrainFlags:
    """What the hook of an instance's pod asks for."""
    environment = {**PREFILL_0, "PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run(pre_stop(role), env=environment, check=True, timeout=60)
    (words,) = calls_of(programs)
    (programs / "calls").unlink()
    assert words[0] == "drain"
    return read_config(DrainFlags, build_parser().parse_args(words))


@pytest.mark.parametrize("role", ROLES)
def test_the_hook_of_an_instances_pod_asks_the_router_to_drain_this_instance(role: str, programs: Path) -> None:
    flags = drain_flags(role, programs)
    assert flags.name == instance_command(role, programs, LWS_WORKER_INDEX="0").flags.name
    http = next(port for port in find("Service", "tandem-control")["spec"]["ports"] if port["name"] == "http")
    assert flags.url == f"http://tandem-control:{http['port']}"
    assert flags.control_key == router_command().flags.control_key


def test_a_routers_pod_has_the_time_that_a_drain_takes() -> None:
    grace_s = dict(pods())["router"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= float(pre_stop("router")[1]) + router_command().flags.drain_timeout_s + CLOSING_S


@pytest.mark.parametrize("role", ROLES)
def test_an_instances_pod_has_the_time_that_a_drain_takes_and_what_is_left_is_ended_by_sigterm(role: str, programs: Path) -> None:
    grace_s = dict(pods())[role]["spec"]["terminationGracePeriodSeconds"]
    within_s = drain_flags(role, programs).within_s
    assert within_s >= instance_command(role, programs, LWS_WORKER_INDEX="0").flags.drain_timeout_s + LAST_S
    assert grace_s >= within_s + CLOSING_S


@pytest.mark.anyio
@pytest.mark.parametrize(("is_quiet", "status"), [(True, 0), (False, 1)])
async def test_the_hook_ends_well_when_nothing_is_lost_with_the_instance_and_not_otherwise(
    is_quiet: bool, status: int, tmp_path: Path, programs: Path
) -> None:
    """The hook as it stands, with the real command, against a router behind a real server, whose key it needs."""
    key = tmp_path / "control.key"
    key.write_text("c" * 24)
    key.chmod(0o600)
    fleet = EchoFleet()
    fleet.decode = replace(fleet.decode, id=InstanceId("decode-0"))
    access = Access(control_key=KeyRing({"c" * 24: "control"}))
    async with Site(fleet, access=access) as site, listening(site) as port:
        ours = f"--url=http://127.0.0.1:{port} --control-key={key} --within-s={30 if is_quiet else 1}"  # the last one counts
        write_program(programs / "launch", f'cd {FOLDER.parents[1]}; exec {sys.executable} -m launch.main "$@" {ours}')
        environment = {**os.environ, "GROUP": "0", "PATH": f"{programs}:{os.environ['PATH']}"}
        hook = await asyncio.create_subprocess_exec(*pre_stop("decode"), env=environment, stderr=asyncio.subprocess.PIPE)
        await until(lambda: (fleet.decode.id, Drain(incarnation=fleet.decode.incarnation)) in fleet.sent)
        fleet.say(Goodbye(id=fleet.decode.id, incarnation=fleet.decode.incarnation, is_quiet=is_quiet))
        _, errors = await asyncio.wait_for(hook.communicate(), 60)
    assert hook.returncode == status, errors
    assert is_quiet or b"it is gone (left), and has not said that its transfers have ended" in errors


@pytest.mark.parametrize("name", ["router", *ROLES])
def test_keys_come_from_the_secret_and_are_readable_by_their_owner_alone(name: str, programs: Path) -> None:
    (secret,) = KUSTOMIZATION["secretGenerator"]
    template = dict(pods())[name]["spec"]
    (volume,) = [volume["secret"] for volume in template["volumes"] if "secret" in volume]
    assert volume["secretName"] == secret["name"] and volume["defaultMode"] == 0o400
    assert "securityContext" not in template, "with fsGroup, Kubernetes would let the group read them, and launch refuses that"
    command = router_command() if name == "router" else instance_command(name, programs, LWS_WORKER_INDEX="0")
    files = [command.flags.cluster_key] + ([command.flags.control_key, command.flags.api_keys] if name == "router" else [])
    assert {f"keys/{Path(file).name}" for file in files} <= set(secret["files"])
    mounts = {mount["name"]: mount["mountPath"] for mount in template["containers"][0]["volumeMounts"]}
    assert {str(Path(file).parent) for file in files} == {mounts["keys"]}
    assert KUSTOMIZATION["generatorOptions"]["disableNameSuffixHash"], "a LeaderWorkerSet would keep the name without its hash"


def test_prometheus_scrapes_the_router_whether_it_is_ready_or_not_and_keeps_the_names_of_instances() -> None:
    spec = find("ServiceMonitor", "tandem")["spec"]
    wanted = spec["selector"]["matchLabels"].items()
    services = [each for each in MANIFESTS if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()]
    assert [service["metadata"]["name"] for service in services] == ["tandem-control"]
    (endpoint,) = spec["endpoints"]
    assert endpoint["port"] in {port["name"] for port in services[0]["spec"]["ports"]}
    assert endpoint["path"] == "/metrics" and endpoint["honorLabels"] is True


@pytest.mark.parametrize("service", ["tandem", "tandem-control"])
def test_the_services_select_the_routers_pods(service: str) -> None:
    labels = dict(pods())["router"]["metadata"]["labels"]
    assert find("Service", service)["spec"]["selector"].items() <= labels.items()
