"""A running fleet as a plan: what its instances have measured of themselves, as its router tells it on /cluster.

Owns what is taken of it, and the means over instances and links. Starts nothing and searches nothing.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.processes.router_client import RequestFailed, RouterClient
from common.step_cost import StepCost

BITS = 8


def measured_fleet(client: RouterClient) -> dict[str, Any]:
    """The fields of a `FleetPlan`. Raises ConfigError, also where nothing is measured."""
    try:
        instances = client.get("/cluster")["instances"]
        prefill = [each for each in instances if each["role"] == "prefill"]
        links = [link for each in prefill for link in client.get(f"/cluster?links={each['id']}")["links"]]
    except RequestFailed as error:
        raise ConfigError(f"--fleet-url {client.url}: {error}") from error
    decode = [each for each in instances if each["role"] != "prefill"]  # whoever serves whole requests too decodes
    if not decode:
        raise ConfigError(f"--fleet-url {client.url}: the fleet has no decode instance, so nothing can be learned of it")
    one = decode[0]
    plan: dict[str, Any] = {
        "prefill": len(prefill),
        "decode": len(decode),
        "kv_pages": min(each["pages_total"] for each in instances),
        "page_size": one["page_size"],
        "kv_token_bytes": one["page_bytes"] // one["page_size"],
        "context_tokens": one["model"]["context_tokens"],
        "max_running": one["max_running"],
        "step_cost": _spelled(prefill or decode, decode),
        "decode_step_cost": _spelled(decode, prefill),
    }
    speeds = [link["bytes_per_s"] for link in links if link.get("bytes_per_s")]
    if speeds:
        plan["link_gbit"] = statistics.median(speeds) * BITS / 1e9
    return plan


def _spelled(those: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> str:
    """The mean cost of their steps. What they have not measured is as with the others. Raises ConfigError."""
    parts = []
    for name in StepCost.__struct_fields__:
        known = [cost for each in (*those, *others) if (cost := each["load"].get(name, 0.0))][: len(those)]
        parts.append(statistics.fmean(known) if known else 0.0)
    if not parts[0] or not parts[1]:
        raise ConfigError("--fleet-url: the fleet has not measured its steps yet: send it some requests first")
    return ",".join(f"{part:.4g}" for part in parts)


def past_load(client: RouterClient, folder: Path) -> str:
    """The requests of the router's last hour, in a file. Raises ConfigError."""
    try:
        lines = client.read("/cluster/load")
    except RequestFailed as error:
        raise ConfigError(f"--fleet-url {client.url}: {error}") from error
    file = folder / "load.jsonl"
    file.write_bytes(lines)
    return str(file)
