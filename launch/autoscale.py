"""`launch autoscale`: asks a router every few seconds how its fleet does, and changes roles and numbers of instances.

Owns the loop, what it remembers between two looks, and who starts and ends instances. `launch/scaling.py` chooses. It may be
killed at any time: what it remembers is what it saw in the last seconds, and what it has begun is seen in the next look.

    look at /cluster ─► rates over --window-s ─► choose ─► held for --hold-s? ─► POST /cluster/{id}/role, or one comes or goes
                                                    └──────── why, in words ────► POST /cluster/decisions
"""

import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

import msgspec

from common.access import read_control_key
from common.errors import ConfigError, needs_file
from common.ids import ROLES, Role, ServingRole
from common.processes.router_client import RequestFailed, RouterClient
from common.sampling_params import ANSWER_TOKENS
from launch.child import watch
from launch.fleet_options import ScalingConfig
from launch.fleet_page import trusting
from launch.scaling import Division, FleetDemand, ScalingChoice, choose
from router.scaling import REASON_CHARS, RoleFigures, ScalingDecision

ANSWER_S = 30.0
"""How long the router may take for an answer: a change of roles takes about a second."""
CATCH_UP_S = 10.0
"""What waits is to be served within so many seconds, beside what comes."""


class FleetLook(NamedTuple):
    """What /cluster said at one moment of this process's clock."""

    at_s: float
    prefill: RoleFigures
    decode: RoleFigures


class FleetWindow:
    """The looks of the last seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._looks: deque[FleetLook] = deque()

    def add(self, look: FleetLook) -> None:
        self._looks.append(look)
        while look.at_s - self._looks[0].at_s > self._window_s:
            self._looks.popleft()

    def demand(self) -> FleetDemand | None:
        """None: nothing has come in this time, or it is too short."""
        first, last = self._looks[0], self._looks[-1]
        prefill, decode, seconds = last.prefill, last.decode, last.at_s - first.at_s
        roles = ((first.prefill, prefill), (first.decode, decode))
        asked = [now.totals.requests - then.totals.requests for then, now in roles]
        requests = max(asked)  # decode instances may have got whole ones, of which no prefill instance knows
        if seconds < self._window_s / 2 or requests <= 0:
            return None
        computed = sum(now.totals.prompt_tokens - then.totals.prompt_tokens for then, now in roles)
        to_compute = sum(now.tokens_to_compute for _, now in roles)
        prompt_tokens = max(1.0, (computed + to_compute - sum(then.tokens_to_compute for then, _ in roles)) / requests)
        waiting = to_compute / prompt_tokens
        ended = decode.totals.requests_ended - first.decode.totals.requests_ended
        made = decode.totals.answer_tokens - first.decode.totals.answer_tokens
        running = sum(look.decode.running_requests for look in self._looks)
        rows = running / len(self._looks)
        comes_per_s = requests / seconds
        backlog_per_s, answers_wait_per_s = waiting / CATCH_UP_S, (waiting + decode.waiting_requests) / CATCH_UP_S
        length = made / ended if ended > 0 else ANSWER_TOKENS
        held, decoding = sum(look.decode.tokens_held for look in self._looks), max(1, decode.instances)
        held_s = decode.held_token_s * held / len(self._looks)
        row_s = decode.step_s + (decode.decode_row_s * rows + held_s) / decoding
        lasting_tokens_per_s = max(comes_per_s * length, rows / row_s)
        tokens_per_s = max((comes_per_s + answers_wait_per_s) * length, (rows + decode.waiting_requests) / row_s)
        return FleetDemand(
            requests_per_s=comes_per_s + backlog_per_s,
            backlog_per_s=backlog_per_s,
            prompt_tokens=prompt_tokens,
            answer_tokens_per_s=tokens_per_s,
            backlog_tokens_per_s=tokens_per_s - lasting_tokens_per_s,
            held_tokens=held / running if running else prompt_tokens + length,
            prompt_step_s=prefill.step_s,
            chunk_token_s=prefill.chunk_token_s,
            step_s=decode.step_s,
            decode_row_s=decode.decode_row_s,
            held_token_s=decode.held_token_s,
            capacity_tokens=decode.capacity_tokens / decoding,
            max_running=decode.max_running / decoding,
        )


class Autoscaler:
    """What is decided from look to look. Opens no connection and reads no clock."""

    def __init__(self, config: ScalingConfig) -> None:
        self._config, self._window = config, FleetWindow(config.window_s)
        self._wanted: tuple[str, ServingRole | None] = "stay", None
        self._wanted_since_s = 0.0
        self._changed: tuple[ServingRole | None, float] = None, 0.0
        """The role to which instances were moved last, and when."""

    def decide(self, page: Mapping[str, Any], kept: int | None, now: float) -> ScalingChoice:
        """page: of /cluster. kept: how many instances somebody keeps alive; None: nobody says."""
        figures = msgspec.convert(page["roles"], dict[Role, RoleFigures])
        prefill, decode = figures["prefill"], figures["decode"]
        self._window.add(FleetLook(now, prefill, decode))
        demand = self._window.demand()
        if not decode.instances:
            return ScalingChoice("stay", "no decode instance takes requests")
        if demand is None:
            return ScalingChoice("stay", "too few requests have come to tell anything")
        leaving = sum(each["state"] == "draining" for each in page["instances"])  # it may count as kept until it has left
        coming = 0 if kept is None else kept - len(page["instances"]) or -leaving
        whole = all(each["role"] == "both" for each in page["instances"] if role_of(each) == "decode")
        choice = choose(demand, self._config, Division(prefill.instances, decode.instances, whole), coming)
        return self._held(choice, now)

    def _held(self, choice: ScalingChoice, now: float) -> ScalingChoice:
        """A change must be the choice for some time, and no role is changed back soon."""
        wanted, config = (choice.action, choice.role), self._config
        if wanted != self._wanted:
            self._wanted, self._wanted_since_s = wanted, now
        role, changed_s = self._changed
        if choice.action == "stay":
            return choice
        moves = choice.action == "flip" and choice.role != "both"
        if moves and role not in (None, choice.role) and now - changed_s < config.rest_s:
            return ScalingChoice("stay", f"{choice.reason}; roles changed the other way {now - changed_s:.0f} s ago")
        hold_s = config.hold_s if choice.action != "remove" else config.rest_s
        if now - self._wanted_since_s < hold_s:
            return ScalingChoice("stay", f"{choice.reason}; that must hold for {hold_s:g} s")
        if moves:
            self._changed = choice.role, now
        self._wanted = "stay", None
        return choice


def role_of(instance: Mapping[str, Any]) -> Role:
    """Whom it counts with: an instance that does both decodes what others have computed."""
    return "prefill" if instance["role"] == "prefill" else "decode"


def whom(page: Mapping[str, Any], choice: ScalingChoice) -> Sequence[str]:
    """The instances whose role changes, or the one that goes: those with the least to do."""
    role = choice.role if choice.action == "remove" else "prefill" if choice.role == "decode" else "decode"
    live = [each for each in page["instances"] if each["state"] == "live" and role_of(each) == role]
    if choice.role == "both":
        live = [each for each in live if each["role"] != "both"]
    live.sort(key=lambda each: (each["load"]["running_tokens"] + each["load"]["waiting_tokens"], each["id"]))
    return [each["id"] for each in live[: choice.count]]


# --- who starts and ends instances -------------------------------------------------------------------------------------------


class LaunchKeeper:
    """The `launch local` or `launch ray` that started the router. What has drained is a spare instance there."""

    def __init__(self, client: RouterClient) -> None:
        self._client = client

    def kept(self, page: Mapping[str, Any]) -> int | None:
        """How many instances are there or will be; None: nobody knows. Each method raises RequestFailed."""
        return None if page["kept"] is None else len(page["kept"]["names"])

    def add(self, role: Role) -> None:
        """Have one more started."""
        self._client.post("/cluster/instances", {"role": role})

    def remove(self, page: Mapping[str, Any], choice: ScalingChoice) -> str:
        """Have one of the chosen role end in order. Returns its name."""
        name = whom(page, choice)[0]
        self._client.post(f"/cluster/{quote(name, safe='')}/drain", {})
        return name


class KubernetesKeeper:
    """The scale subresources of two workloads, as the account of this pod may read and write them. Instance N of a workload is
    called prefill-N or decode-N, and the one with the highest number goes first, whatever its role is now.

    https://kubernetes.io/docs/reference/kubernetes-api/autoscaling-resources/scale-v1/
    """

    def __init__(self, config: ScalingConfig) -> None:
        """Raises ConfigError."""
        self._account = Path(config.kube_account)
        self._url = config.kube_url
        file = self._account / "namespace"
        with needs_file(f"--kube-account: {file} cannot be read"):
            namespace = file.read_text().strip()
        self._paths: dict[Role, str] = {}
        for role, workload in zip(ROLES, (config.kube_prefill, config.kube_decode), strict=True):
            group, version, plural, name = workload.split("/")
            self._paths[role] = f"/apis/{group}/{version}/namespaces/{namespace}/{plural}/{name}/scale"

    def kept(self, page: Mapping[str, Any]) -> int:
        return sum(int(self._scale(role)["spec"].get("replicas", 0)) for role in ROLES)

    def add(self, role: Role) -> None:
        self._change(role, self._scale(role), 1)

    def remove(self, page: Mapping[str, Any], choice: ScalingChoice) -> str:
        roles = {each["id"]: role_of(each) for each in page["instances"]}
        scales = {role: self._scale(role) for role in ROLES}
        last = {role: f"{role}-{scales[role]['spec'].get('replicas', 0) - 1}" for role in ROLES}
        goes = next((role for role in ROLES if roles.get(last[role]) == choice.role), None)
        if goes is None:
            raise RequestFailed(f"{' and '.join(last.values())} would go first, and neither is a {choice.role} instance")
        self._change(goes, scales[goes], -1)
        return last[goes]

    def _scale(self, role: Role) -> dict[str, Any]:
        scale: dict[str, Any] = self._client().get(self._paths[role])
        return scale

    def _change(self, role: Role, scale: dict[str, Any], by: int) -> None:
        """Its resource version goes back with it: a scale that somebody else has changed since is refused."""
        scale["spec"]["replicas"] = scale["spec"].get("replicas", 0) + by
        self._client().send("PUT", self._paths[role], scale)

    def _client(self) -> RouterClient:
        """The token is renewed now and then."""
        try:
            token, trusted = (self._account / "token").read_text().strip(), self._account / "ca.crt"
            tls = ssl.create_default_context(cafile=str(trusted)) if self._url.startswith("https") else None
        except OSError as error:
            raise RequestFailed(f"the account of this pod cannot be read: {error}") from error
        return RouterClient(self._url, token, ANSWER_S, tls)


InstanceKeeper: TypeAlias = LaunchKeeper | KubernetesKeeper


# --- the loop ------------------------------------------------------------------------------------------------------------------


class ScalingLoop:
    """Looks, has chosen, and acts."""

    def __init__(self, config: ScalingConfig, client: RouterClient, keeper: InstanceKeeper | None) -> None:
        self._autoscaler = Autoscaler(config)
        self._client, self._keeper = client, keeper
        self._is_dry = config.dry_run == "on"

    def turn(self, now: float) -> list[ScalingDecision]:
        """One look, and what follows from it. Raises RequestFailed when nothing can be seen."""
        page = self._client.get("/cluster")
        try:
            kept = None if self._keeper is None else self._keeper.kept(page)
            decisions = list(self._carry_out(page, self._autoscaler.decide(page, kept, now)))
        except (KeyError, msgspec.ValidationError) as error:
            raise RequestFailed(f"/cluster lacks what is needed here: is the router of an older release? ({error})") from error
        for decision in decisions:
            self._client.post("/cluster/decisions", msgspec.to_builtins(decision))
        return decisions

    def _carry_out(self, page: Mapping[str, Any], choice: ScalingChoice) -> Iterator[ScalingDecision]:
        for name in whom(page, choice) if choice.action == "flip" else [""]:
            outcome = ""
            try:
                name = self._act(page, choice, name)
            except RequestFailed as error:
                outcome = str(error)[:REASON_CHARS]
            yield ScalingDecision(action=choice.action, reason=choice.reason, instance=name, role=choice.role, outcome=outcome)

    def _act(self, page: Mapping[str, Any], choice: ScalingChoice, name: str) -> str:
        """Returns whom it was about. Raises RequestFailed."""
        if choice.action != "stay" and self._is_dry:
            raise RequestFailed("nothing was changed: --dry-run")
        if choice.action == "flip":
            self._client.post(f"/cluster/{quote(name, safe='')}/role", {"role": choice.role})
        elif choice.action == "add" and self._keeper is not None and choice.role is not None and choice.role != "both":
            self._keeper.add(choice.role)
        elif choice.action == "remove" and self._keeper is not None:
            return self._keeper.remove(page, choice)
        return name


def run(config: ScalingConfig) -> int:
    """Until a signal. Returns the exit status. Raises ConfigError."""
    try:
        client = RouterClient(config.router, read_control_key(config.control_key), ANSWER_S, trusting(config.tls_cert))
    except RequestFailed as error:
        raise ConfigError(f"--router: {error}") from error
    keeper: InstanceKeeper | None = LaunchKeeper(client) if config.scale == "launch" else None
    if config.scale == "kubernetes":
        keeper = KubernetesKeeper(config)
    loop, stopped = ScalingLoop(config, client, keeper), threading.Event()
    watch(lambda number: stopped.set())
    while not stopped.is_set():
        began_s = time.monotonic()
        try:
            for each in loop.turn(began_s):
                if each.action != "stay":
                    print(f"{each.action} {each.instance}: {each.reason} {each.outcome}".rstrip(), flush=True)
        except RequestFailed as error:
            print(error, file=sys.stderr, flush=True)
        stopped.wait(max(0.0, began_s + config.interval_s - time.monotonic()))
    return 0
