"""What `launch local` and `launch ray` are told about a fleet: how many processes, and which cores and nodes they have.

Owns the flags and the arithmetic of cores, ranks and nodes. Imports nothing heavy: Ray is not needed to read the flags. What
instances lend each other while they serve is `engine/cpu/lent_cores.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from common.errors import ConfigError
from common.options import (
    Switch,
    option,
    parse_numbers,
    refuse_without_effect,
    require,
    require_above_0,
    require_at_least,
    require_between,
    require_choices,
)

MOST_ROUTERS = 64
DECODE_TOKEN = 2.0
"""What an answer's token costs, in tokens of prompts: about this much in batches of 8 to 16 rows, where reading the weights
counts as much as computing with them (docs/measurements/cpu.md)."""


@dataclass(frozen=True, kw_only=True)
class FleetCounts:
    """How many."""

    prefill: int = option(1, "number of prefill instances; 0 means colocated serving")
    decode: int = option(1, "number of decode instances", metavar="M")
    both: int = option(0, "number of instances that decode for others, and serve whole requests where that costs less")
    routers: int = option(1, "number of routers, which share the HTTP port", metavar="R")
    spare: int = option(
        0, "instances that are started only when POST /cluster/instances asks for them (launch autoscale does); room is kept"
    )

    @property
    def decoding(self) -> int:
        """The instances that decode."""
        return self.decode + self.both

    def of(self, role: str) -> int:
        """Those of a role: prefill, decode or both."""
        return {"prefill": self.prefill, "decode": self.decode, "both": self.both}[role]

    def __post_init__(self) -> None:
        require_at_least(self, prefill=0, decode=0, both=0, spare=0)
        require(self.decoding > 0, "decode", "at least 1, or give --both 1", self.decode)
        require_between(self, 1, MOST_ROUTERS, "routers")


@dataclass(frozen=True, kw_only=True)
class CoresConfig:
    """How the cores of a host without GPUs are divided."""

    workload: str = option(
        "512,128",
        "tokens of a typical prompt and of its answer: prefill and decode instances get cores by the work that each makes",
    )
    lend_cores: Switch = option(
        "on", "on: while an instance has nothing to compute, others on this host use its cores too; off: each uses its own only"
    )

    def __post_init__(self) -> None:
        lengths = parse_numbers(self.workload, "workload", int)
        require(len(lengths) == 2 and min(lengths) >= 1, "workload", "two numbers of tokens, such as 512,128", self.workload)

    @property
    def prefill_share(self) -> float:
        """The share of the work that prefill instances do."""
        prompt, answer = parse_numbers(self.workload, "workload", int)
        return prompt / (prompt + DECODE_TOKEN * answer)


def divide_by_work(cores: int, prefill: int, decode: int, prefill_share: float) -> tuple[int, int]:
    """Cores of each prefill and of each decode instance: at least one each, and together no more than there are where possible.
    Of all divisions it is the one whose slower role takes the least time.

    prefill, decode: how many instances. prefill_share: of the work, where there are both.
    """
    if not prefill:
        return 0, max(1, cores // decode)

    def slower_role(decode_cores: int) -> float:
        """How long the role takes that takes longer."""
        prefill_s = prefill_share / (prefill * left_for_prefill(decode_cores))
        return max(prefill_s, (1 - prefill_share) / (decode * decode_cores))

    def left_for_prefill(decode_cores: int) -> int:
        return max(1, (cores - decode_cores * decode) // prefill)

    decode_cores = min(range(1, max(1, (cores - prefill) // decode) + 1), key=slower_role)
    return left_for_prefill(decode_cores), decode_cores


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Where instances run on a Ray cluster."""

    ray_address: str = option("auto", "the Ray cluster: host:port of its head; auto: the cluster that this host is a node of")
    nodes_per_instance: int = option(
        1, "nodes that share the ranks of an instance equally; 1: all ranks on one node; 2 or more: on as many different nodes"
    )
    cpus_per_rank: int = option(
        1, "processors that Ray reserves for each rank: its threads too, if --threads does not give others"
    )

    def __post_init__(self) -> None:
        shown = self.ray_address
        require(shown != "" and "://" not in shown, "ray-address", "host:port of the head, or auto", shown)
        require_at_least(self, nodes_per_instance=1, cpus_per_rank=1)


@dataclass(frozen=True, slots=True)
class Bundle:
    """What Ray reserves on one node for ranks `first` to `last` of an instance."""

    first: int
    last: int
    cpus: int
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """The resources as Ray writes them."""
        return {kind: float(amount) for kind, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}


def bundles_of(config: RayConfig, ranks: int, on_gpus: bool) -> list[Bundle]:
    """The bundles of one instance, in the order of its ranks: the first bundle holds rank 0. Raises ConfigError when ranks do
    not divide."""
    each, left = divmod(ranks, config.nodes_per_instance)
    if left:
        raise ConfigError(f"--tp {ranks} ranks cannot be divided equally among --nodes-per-instance {config.nodes_per_instance}")
    return [
        Bundle(first, first + each - 1, each * config.cpus_per_rank, each if on_gpus else 0) for first in range(0, ranks, each)
    ]


def check_gpus(bundle: Bundle, device: str, nodes: Iterable[Mapping[str, Any]]) -> None:
    """nodes: as `ray.nodes()` lists them. Raises ConfigError for a bundle with GPUs where no node has one, unless the device is
    given as cuda: then somebody, such as Ray's autoscaler, will add such nodes, and they are waited for."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    if bundle.gpus and device == "auto" and not any(each.get("GPU") for each in resources):
        raise ConfigError(
            f"no node of the Ray cluster has a GPU (alive nodes: {len(resources)}): give --device cpu to serve without, or "
            "--device cuda to wait until nodes with GPUs join; a node that has some says how many with `ray start --num-gpus N`"
        )


Scaler = Literal["none", "launch", "kubernetes"]
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
LWS = "leaderworkerset.x-k8s.io/v1/leaderworkersets"
NO_LIMIT = 100_000
"""More instances than any fleet has."""


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """How a fleet shapes itself."""

    router: str = option("http://127.0.0.1:8000", "URL of the router's HTTP API")
    control_key: str = option("", "file with the router's control key, where it has one")
    tls_cert: str = option("", "the router's certificate, where this machine does not trust it otherwise")
    interval_s: float = option(2.0, "seconds between two looks at the fleet")
    window_s: float = option(12.0, "rates are means over so many seconds")
    hold_s: float = option(4.0, "a change that has been the best for so many seconds is made; an instance goes after --rest-s")
    rest_s: float = option(30.0, "roles are changed back after so many seconds at the earliest")
    margin: float = option(0.15, "a change of roles must serve this share more")
    slo_ttft_s: float = option(2.0, "first tokens are to come within so many seconds")
    slo_itl_s: float = option(0.05, "and next tokens each within so many seconds")
    min_prefill: int = option(1, "fewest prefill instances; 0: decode instances may serve alone")
    max_prefill: int = option(NO_LIMIT, "most prefill instances")
    min_decode: int = option(1, "fewest decode instances")
    max_decode: int = option(NO_LIMIT, "most decode instances")
    dry_run: Switch = option("off", "on: decide and tell, but change nothing")
    scale: Scaler = option(
        "none",
        "who starts and ends instances; none: nobody, only roles change; launch: the `launch local` or `launch ray` that started "
        "the router with --spare instances; kubernetes: the scale of two workloads",
    )

    kube_url: str = option("https://kubernetes.default.svc", "with --scale kubernetes: URL of the API server")
    kube_account: str = option(ACCOUNT, "with --scale kubernetes: folder with token, ca.crt and namespace of the service account")
    kube_prefill: str = option(f"{LWS}/tandem-prefill", "with --scale kubernetes: group/version/plural/name of the workload")
    kube_decode: str = option(f"{LWS}/tandem-decode", "the same for decode instances")

    def __post_init__(self) -> None:
        require_above_0(self, "interval_s", "slo_ttft_s", "slo_itl_s")
        require_at_least(self, hold_s=0, rest_s=0, margin=0.01, min_prefill=0, min_decode=1, window_s=2 * self.interval_s)
        require_at_least(self, max_prefill=self.min_prefill, max_decode=self.min_decode)
        require_choices(self)
        for flag in ("kube_prefill", "kube_decode"):
            parts = vars(self)[flag].split("/")
            rule = "group/version/plural/name, such as apps/v1/statefulsets/one"
            require(len(parts) == 4 and all(parts), flag, rule, vars(self)[flag])
        if self.scale != "kubernetes":
            refuse_without_effect(self, ("kube_url", "kube_account", "kube_prefill", "kube_decode"), "without --scale kubernetes")

    def allows(self, prefill: int, decode: int) -> bool:
        """Whether a fleet may have so many instances."""
        return self.min_prefill <= prefill <= self.max_prefill and self.min_decode <= decode <= self.max_decode


@dataclass(frozen=True, kw_only=True)
class TopFlags:
    """What `launch top` asks for."""

    url: str = option("http://127.0.0.1:8000", "of the router")
    control_key: str = option("", "file with the router's control key; without it: none is sent")
    once: Switch = option("off", "print one state, and end")
