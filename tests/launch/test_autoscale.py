"""`launch autoscale` from look to look, with a router and an API server of Kubernetes that are HTTP servers here."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict
from msgspec.structs import replace as replaced

from common.errors import ConfigError
from common.processes.router_client import RequestFailed, RouterClient
from launch.autoscale import Autoscaler, FleetLook, FleetWindow, KubernetesKeeper, LaunchKeeper, ScalingLoop
from launch.fleet_options import ScalingConfig
from launch.scaling import ScalingChoice
from router.members import RoleTotals
from router.scaling import RoleFigures
from tests.deploy.test_kubernetes import VERSIONS

CONFIG = ScalingConfig(interval_s=2.0, window_s=10.0, hold_s=4.0, rest_s=30.0)
FIGURES = RoleFigures(
    instances=2, queue_s=0.0, occupancy=0.1, predicted_ttft_s=0.2, waiting_requests=0, running_requests=0, tokens_to_compute=0,
    tokens_held=0, capacity_tokens=600_000, max_running=128, step_s=0.02, chunk_token_s=0.0003, decode_row_s=0.0008,
    totals=RoleTotals(),
)  # fmt: skip


class Fleet:
    """A fleet whose load is played: each second so many requests come, with so many tokens, and all is served at once."""

    def __init__(self, prefill: int = 2, decode: int = 4) -> None:
        self.counts = {"prefill": prefill, "decode": decode}
        self.requests_per_s, self.prompt_tokens, self.answer_tokens = 4, 2000, 200
        self.now = 100.0
        self.kept: dict[str, Any] | None = None
        self.draining = 0
        """So many more instances leave."""
        self._totals = {"prefill": RoleTotals(), "decode": RoleTotals()}

    def page(self, seconds: float = 2.0) -> dict[str, Any]:
        """What /cluster says so many seconds later."""
        self.now += seconds
        requests = round(self.requests_per_s * seconds)
        for role, tokens in (("prefill", self.prompt_tokens), ("decode", self.answer_tokens)):
            totals = self._totals[role]
            totals.requests += requests
            totals.requests_ended += requests
            if role == "prefill":
                totals.prompt_tokens += requests * tokens
            else:
                totals.answer_tokens += requests * tokens
        rows = {"prefill": 0, "decode": 16}
        roles = {
            role: {
                **asdict(FIGURES),
                "instances": count, "running_requests": rows[role], "tokens_held": rows[role] * 2100,
                "capacity_tokens": 300_000 * count, "max_running": 64 * count,
                "totals": asdict(self._totals[role]),
            }
            for role, count in self.counts.items()
        }  # fmt: skip
        instances = [
            {
                "id": f"{role}-{number}",
                "role": role,
                "state": "live",
                "load": {"running_tokens": 100 - number, "waiting_tokens": 0},
            }
            for role, count in self.counts.items()
            for number in range(count)
        ]
        leaving = [{"id": f"old-{number}", "role": "decode", "state": "draining"} for number in range(self.draining)]
        return {"roles": roles, "instances": instances + leaving, "kept": self.kept}


def follow(autoscaler: Autoscaler, fleet: Fleet, looks: int) -> list[ScalingChoice]:
    """What it decides, with each flip made at once."""
    made: list[ScalingChoice] = []
    for _ in range(looks):
        choice = autoscaler.decide(fleet.page(), None, fleet.now)
        made.append(choice)
        if choice.action == "flip":
            assert choice.role is not None
            fleet.counts[choice.role] += choice.count
            fleet.counts["decode" if choice.role == "prefill" else "prefill"] -= choice.count
    return made


def test_rates_are_those_between_the_first_and_the_last_look() -> None:
    fleet, window = Fleet(), FleetWindow(10.0)
    demand = None
    for _ in range(9):
        page = fleet.page()
        figures = [RoleFigures(**{**each, "totals": RoleTotals(**each["totals"])}) for each in page["roles"].values()]
        window.add(FleetLook(fleet.now, *figures))
        demand = window.demand()
    assert demand is not None
    assert (demand.requests_per_s, demand.prompt_tokens, demand.capacity_tokens, demand.max_running) == (4.0, 2000.0, 300_000, 64)
    assert demand.answer_tokens_per_s == pytest.approx(4.0 * 200) and demand.held_tokens == 2100


def test_what_waits_counts_as_if_it_came() -> None:
    window = FleetWindow(10.0)
    for seconds in (0.0, 10.0):
        prefill = replaced(FIGURES, tokens_to_compute=int(2000 * seconds), totals=RoleTotals(int(seconds)))
        window.add(FleetLook(seconds, prefill, FIGURES))
    demand = window.demand()
    assert demand is not None and demand.prompt_tokens == 2000 and demand.requests_per_s == pytest.approx(1.0 + 10 / 10)


def test_nothing_is_decided_before_there_are_rates() -> None:
    assert all("too few" in each.reason for each in follow(Autoscaler(CONFIG), Fleet(), 3))


def test_a_change_is_made_when_it_was_the_best_for_some_time_and_then_the_fleet_stays() -> None:
    made = follow(Autoscaler(CONFIG), fleet := Fleet(), 12)
    flips = [number for number, each in enumerate(made) if each.action == "flip"]
    assert flips and "must hold for 4 s" in made[flips[0] - 1].reason and "must hold" in made[flips[0] - 2].reason
    assert fleet.counts == {"prefill": 4, "decode": 2} and made[-1].action == "stay"


def test_roles_are_not_changed_back_soon_however_the_load_changes() -> None:
    autoscaler, fleet = Autoscaler(CONFIG), Fleet()
    follow(autoscaler, fleet, 12)
    changed_s = fleet.now
    fleet.prompt_tokens, fleet.answer_tokens = 400, 700
    made = follow(autoscaler, fleet, 30)
    first = next(number for number, each in enumerate(made) if each.action == "flip")
    assert any("changed the other way" in each.reason for each in made[:first]) and fleet.now - changed_s > 0
    assert fleet.counts["decode"] > 2


def test_a_fleet_that_is_looked_at_for_the_first_time_after_a_restart_is_decided_alike() -> None:
    before, after = Fleet(), Fleet()
    follow(Autoscaler(CONFIG), before, 9)
    follow(Autoscaler(CONFIG), after, 4)  # killed
    follow(Autoscaler(CONFIG), after, 16)
    assert before.counts == after.counts == {"prefill": 4, "decode": 2}


# --- over HTTP ---------------------------------------------------------------------------------------------------------------

Answer = Callable[[str, str, Any], tuple[int, Any]]


class Server:
    """answer: from method, path and body to status and body. asked: every request that came."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[tuple[str, str, Any, str]] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def _any(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                sent = self.rfile.read(length)
                body = json.loads(sent) if self.headers.get("Content-Type") == "application/json" and sent else None
                asked.append((self.command, self.path, body, self.headers.get("Authorization", "")))
                status, said = answer(self.command, self.path, body)
                data = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = _any

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class RouterOf:
    """A router of the played fleet."""

    def __init__(self, fleet: Fleet, refuses: str = "") -> None:
        self.fleet, self.refuses = fleet, refuses

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if (method, path) == ("GET", "/cluster"):
            return 200, self.fleet.page()
        if path.endswith("/role") and self.refuses:
            return 409, {"error": {"message": self.refuses}}
        return 200, {}


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def turns(fleet: Fleet, config: ScalingConfig, looks: int, refuses: str = "") -> list[tuple[str, str, Any]]:
    """What the loop asks of the router besides the page."""
    with closing(Server(RouterOf(fleet, refuses))) as server:
        client = RouterClient(server.url, "the-key")
        loop = ScalingLoop(config, client, LaunchKeeper(client) if config.scale == "launch" else None)
        for _ in range(looks):
            loop.turn(fleet.now + 2.0)
        assert {key for *_, key in server.asked} == {"Bearer the-key"}
        return [(method, path, body) for method, path, body, _ in server.asked if path != "/cluster"]


def test_flips_are_asked_of_the_router_for_the_instances_with_the_least_to_do_and_their_reason_told(fleet: Fleet) -> None:
    asked = turns(fleet, CONFIG, 6)
    assert [path for _, path, _ in asked if path.endswith("/role")] == ["/cluster/decode-3/role", "/cluster/decode-2/role"]
    at = asked.index(("POST", "/cluster/decode-3/role", {"role": "prefill"}))
    _, path, decision = asked[at + 2]
    assert (path, decision["action"], decision["instance"]) == ("/cluster/decisions", "flip", "decode-3")
    assert decision["reason"].startswith("2 prefill + 4 decode serve") and decision["outcome"] == ""
    assert [body["action"] for _, path, body in asked if path == "/cluster/decisions"].count("stay") == 5


def test_all_decode_instances_get_the_role_both_where_no_other_may_compute_prompts(fleet: Fleet) -> None:
    fleet.counts, config = {"prefill": 1, "decode": 3}, replace(CONFIG, max_prefill=1)
    flips = [path for _, path, body in turns(fleet, config, 6) if body == {"role": "both"}]
    assert flips == [f"/cluster/decode-{number}/role" for number in (2, 1, 0)]
    autoscaler = Autoscaler(config)
    for _ in range(8):
        page = fleet.page()
        for each in page["instances"][1:]:
            each["role"] = "both"
        choice = autoscaler.decide(page, None, fleet.now)
    assert choice.action == "stay" and choice.reason.startswith("1 prefill + 3 both serve ")


def test_a_dry_run_tells_and_changes_nothing(fleet: Fleet) -> None:
    asked = turns(fleet, replace(CONFIG, dry_run="on"), 6)
    assert {path for _, path, _ in asked} == {"/cluster/decisions"}
    assert [body["outcome"] for *_, body in asked if body["action"] == "flip"] == ["nothing was changed: --dry-run"] * 2


def test_a_flip_that_is_refused_is_told_with_the_refusal_and_chosen_again(fleet: Fleet) -> None:
    asked = turns(fleet, CONFIG, 9, refuses="it is the last one")
    outcomes = [body["outcome"] for _, path, body in asked if path == "/cluster/decisions" and body["action"] == "flip"]
    assert outcomes == ["it is the last one"] * 4, "two instances, twice"


def test_instances_come_and_go_through_the_launch_that_started_the_router(fleet: Fleet) -> None:
    fleet.counts, fleet.requests_per_s = {"prefill": 4, "decode": 2}, 8
    fleet.kept = {"names": [str(number) for number in range(6)], "spare": 1}
    config = replace(CONFIG, scale="launch", max_decode=2)
    assert ("POST", "/cluster/instances", {"role": "prefill"}) in turns(fleet, config, 6)
    fleet.kept["names"].append("7")
    assert not [path for _, path, _ in turns(fleet, config, 6) if path == "/cluster/instances"], "one is on its way"
    fleet.kept["names"].pop()
    fleet.requests_per_s, fleet.answer_tokens = 1, 10
    asked = turns(fleet, replace(config, rest_s=4.0), 9)
    assert ("POST", "/cluster/prefill-3/drain", {}) in asked


def test_no_instance_goes_while_another_one_drains(fleet: Fleet) -> None:
    fleet.counts, fleet.requests_per_s, fleet.answer_tokens = {"prefill": 4, "decode": 2}, 1, 10
    fleet.kept, fleet.draining = {"names": [str(number) for number in range(7)], "spare": 0}, 1
    config = replace(CONFIG, scale="launch", rest_s=4.0, max_decode=2)
    assert {path for _, path, _ in turns(fleet, config, 9)} == {"/cluster/decisions"}


def test_a_refusal_of_any_length_is_told(fleet: Fleet) -> None:
    asked = turns(fleet, CONFIG, 6, refuses="no " * 1000)
    told = [body["outcome"] for _, path, body in asked if path == "/cluster/decisions" and body["action"] == "flip"]
    assert len(told) == 2 and all(0 < len(each) <= 1000 for each in told)


def test_requests_that_decode_instances_get_whole_count() -> None:
    window = FleetWindow(10.0)
    for share in (0, 1):
        figures = [
            replaced(FIGURES, totals=RoleTotals(share * requests, share * requests, share * tokens, 0))
            for requests, tokens in ((10, 3_000), (100, 27_000))  # ten of these hundred came from prefill instances
        ]
        window.add(FleetLook(10.0 * share, *figures))
    demand = window.demand()
    assert demand is not None and (demand.requests_per_s, demand.prompt_tokens) == (10.0, 300.0)


class ApiServer:
    """The scales of two workloads, as Kubernetes keeps them: each body is held against the published schema of
    autoscaling/v1 Scale, and one that does not say the latest version is refused."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.scales = {
            f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/tandem/leaderworkersets/tandem-{role}/scale": {
                "apiVersion": "autoscaling/v1",
                "kind": "Scale",
                "metadata": {"name": f"tandem-{role}", "namespace": "tandem", "resourceVersion": "7", "uid": "1-2-3"},
                "spec": {"replicas": replicas},
                "status": {"replicas": replicas, "selector": "leaderworkerset.sigs.k8s.io/name=tandem"},
            }
            for role, replicas in (("prefill", prefill), ("decode", decode))
        }
        self.forbids = False

    @property
    def replicas(self) -> list[Any]:
        return [scale["spec"]["replicas"] for scale in self.scales.values()]  # type: ignore[index]

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        scale: Any = self.scales.get(path)
        if self.forbids or scale is None:
            why = "scales is forbidden" if self.forbids else "not found"
            return 403, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": why, "code": 403}
        if method == "PUT":
            kubernetes_validate = pytest.importorskip("kubernetes_validate")
            for version in VERSIONS:
                kubernetes_validate.validate(body, version, strict=True)
            if body["metadata"]["resourceVersion"] != scale["metadata"]["resourceVersion"]:
                return 409, {"kind": "Status", "message": "the object has been modified", "code": 409}
            scale["spec"] = body["spec"]
            scale["metadata"] = {**scale["metadata"], "resourceVersion": str(int(scale["metadata"]["resourceVersion"]) + 1)}
        return 200, scale


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("tandem")
    return tmp_path


@pytest.fixture
def cluster(account: Path) -> Iterator[tuple[ApiServer, Server, KubernetesKeeper]]:
    api = ApiServer(3, 2)
    with closing(Server(api)) as server:
        config = ScalingConfig(scale="kubernetes", kube_url=server.url, kube_account=str(account))
        yield api, server, KubernetesKeeper(config)


Cluster = tuple[ApiServer, Server, KubernetesKeeper]


def test_an_instance_more_is_one_replica_more_of_the_workload_of_its_role(cluster: Cluster, account: Path) -> None:
    api, server, keeper = cluster
    assert keeper.kept({}) == 5
    keeper.add("decode")
    (account / "token").write_text("second")
    keeper.add("decode")
    assert api.replicas == [3, 4] and keeper.kept({}) == 7
    keys = [key for method, _, _, key in server.asked if method == "PUT"]
    assert keys == ["Bearer first", "Bearer second"], "the token is read again"


def test_an_instance_less_is_the_last_one_of_a_workload_and_has_the_role_that_has_too_many(cluster: Cluster) -> None:
    api, _, keeper = cluster
    roles = {"prefill-2": "decode", "decode-1": "both", "prefill-1": "prefill"}
    page = {"instances": [{"id": name, "role": role} for name, role in roles.items()]}
    assert keeper.remove(page, ScalingChoice("remove", "", "decode")) == "prefill-2" and api.replicas == [2, 2]
    assert keeper.remove(page, ScalingChoice("remove", "", "decode")) == "decode-1" and api.replicas == [2, 1]
    with pytest.raises(RequestFailed, match="decode-0 would go first"):
        keeper.remove({"instances": []}, ScalingChoice("remove", "", "prefill"))


def test_what_kubernetes_refuses_is_told_in_its_words(cluster: Cluster) -> None:
    api, _, keeper = cluster
    scale = keeper._scale("prefill")
    keeper.add("prefill")
    with pytest.raises(RequestFailed, match="has been modified"):
        keeper._change("prefill", scale, 1)
    api.forbids = True
    with pytest.raises(RequestFailed, match="forbidden"):
        keeper.add("prefill")
    assert api.replicas == [4, 2]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"kube_url": "http://x"}, "--kube-url has no effect"),
        ({"scale": "kubernetes", "kube_prefill": "deployments/one"}, "--kube-prefill must be group/version"),
        ({"min_decode": 0}, "--min-decode"),
        ({"min_prefill": 3, "max_prefill": 2}, "--max-prefill"),
        ({"interval_s": 0.0}, "--interval-s"),
        ({"window_s": 1.0}, "--window-s"),
        ({"margin": 0.0}, "--margin"),
    ],
)
def test_a_wrong_flag_is_refused_by_its_name(flags: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ScalingConfig(**flags)


def test_without_an_account_kubernetes_cannot_be_asked() -> None:
    with pytest.raises(ConfigError, match="--kube-account"):
        KubernetesKeeper(ScalingConfig(scale="kubernetes", kube_account="/nowhere"))


def test_a_router_of_an_older_release_is_named_as_what_is_wrong(fleet: Fleet) -> None:
    page = fleet.page()
    for gone in ("roles", "kept"):
        older = {name: value for name, value in page.items() if name != gone}
        with closing(Server(lambda method, path, body, older=older: (200, older))) as server:  # type: ignore[misc]
            client = RouterClient(server.url)
            with pytest.raises(RequestFailed, match="older release"):
                ScalingLoop(CONFIG, client, LaunchKeeper(client)).turn(1.0)
