"""What `launch ray` is told about the Ray cluster, and what it asks of it for each instance.

Owns the flags and the arithmetic of ranks and nodes. Imports nothing heavy: Ray is not needed to read the flags.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.options import option, require, require_at_least


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
        """As Ray writes them."""
        return {kind: float(amount) for kind, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}


def bundles_of(config: RayConfig, ranks: int, on_gpus: bool) -> list[Bundle]:
    """Of one instance, in the order of its ranks: the first bundle holds rank 0. Raises ConfigError when ranks do not divide."""
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
