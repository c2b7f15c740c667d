"""The Grafana dashboards ask for metrics that the router has, by labels that they have, as their types demand."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.messages import DetokenizerHeartbeat
from tests.router.calls import chat, get, post, until
from tests.router.fakes import Site

FILES = sorted((Path(__file__).parents[2] / "deploy/grafana").glob("*.json"))
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in FILES}
PANELS = [panel for dashboard in DASHBOARDS.values() for panel in dashboard["panels"] if panel["type"] != "row"]
QUERIES = [(target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
OF_ALL = re.compile(r"\btandem_(?:instance|role)_")
"""Figures that every router has, of the same instances."""
ONCE = re.compile(r"\b(?:max|min)(?: by \([^)]*\) )?\((?:[^()]|\([^()]*\))*\)")


@dataclass
class Known:
    """A metric that the router exposes."""

    kind: str
    labels: set[str] = field(default_factory=set)


async def exposed(site: Site) -> dict[str, Known]:
    """The metrics of a router that has served, refused and been told something, by the names of their samples."""
    await post(site, "/v1/chat/completions", chat())
    await post(site, "/v1/chat/completions", chat(n=0))
    site.fleet.frames_refused["magic"] = site.fleet.messages_lost["full"] = 1
    site.fleet.say(DetokenizerHeartbeat(open_answers=0, early_answers=0, dropped=0))
    await until(lambda: site.core.detokenizers[0].last is not None)
    names: dict[str, Known] = {}
    for family in text_string_to_metric_families((await get(site, "/metrics")).text):
        names |= {family.name + suffix: Known(family.type) for suffix in SUFFIXES[family.type]}
        for sample in family.samples:
            names[sample.name].labels |= sample.labels.keys()
    return names


@pytest.mark.anyio
async def test_every_query_names_metrics_and_labels_that_exist(site: Site) -> None:
    known = await exposed(site)
    assert len(QUERIES) > 20
    faults = [f"{query}: {fault}" for query, legend in QUERIES for fault in faults_of(query, legend, known)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("query", "legend", "fault"),
    [
        ("up_and_away", "", "no metric"),
        ("rate(up[5m])", "", "gauge"),
        ("steps_total", "", "counter"),
        ("sum by (colour) (up)", "", "colour"),
        ('up{colour="red"}', "", "colour"),
        ("sum by (role) (up)", "{{instance}}", "instance"),
        ("steps_bucket / up", "{{le}}", "le"),
        ("sum by (role) (max by (instance, role) (up))", "{{instance}}", "instance"),
        ("sum by (role) (max by (instance, role) (up))", "{{role}}", ""),
        ("sum by (role) (tandem_instance_up)", "", "once for each"),
        ("max(tandem_instance_up)", "", ""),
        ("sum by (role) (max by (instance, role) (tandem_instance_up)) / tandem_instance_up", "", "once for each"),
    ],
)
def test_a_wrong_query_is_found(query: str, legend: str, fault: str) -> None:
    of_instances = {"instance", "role"}
    known = {
        "tandem_up": Known("gauge", of_instances),
        "tandem_instance_up": Known("gauge", of_instances),
        "tandem_steps_total": Known("counter", of_instances),
        "tandem_steps_bucket": Known("histogram", {"le"}),
    }
    query = re.sub(r"\b(up|steps)", r"tandem_\1", query)
    found = faults_of(query, legend, known)
    assert any(fault in each for each in found) if fault else not found


def faults_of(query: str, legend: str, known: dict[str, Known]) -> list[str]:
    """What Prometheus would answer with nothing, or with nonsense."""
    names = re.findall(r"\btandem_\w+", query)
    faults = [f"no metric {name}" for name in names if name not in known]
    if faults or not names:
        return faults or ["no metric at all"]
    rated = set(re.findall(r"\brate\((tandem_\w+)", query))
    faults += [f"{name} is a counter" for name in names if known[name].kind != "gauge" and name not in rated]
    faults += [f"{name} is a gauge" for name in rated if known[name].kind == "gauge"]
    labels = set.intersection(*(known[name].labels for name in names))
    groups = [{label.strip() for label in group.split(",")} for group in re.findall(r"by \(([^)]*)\)", query)]
    chosen = re.findall(r"[{,]\s*(\w+)(?:=|!=|=~)", query)
    shown = re.findall(r"\{\{(\w+)\}\}", legend)
    faults += [f"not a label of all metrics: {label}" for label in set(chosen).union(*groups) - labels]
    left = groups[0] if groups else labels
    faults += ["every router has it, and it is counted once for each" for _ in OF_ALL.findall(ONCE.sub("", query))]
    return faults + [f"the legend shows {label}, which the query does not keep" for label in set(shown) - left]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_numbers_of_their_own_and_do_not_overlap(name: str) -> None:
    panels = DASHBOARDS[name]["panels"]
    assert DASHBOARDS[name]["uid"] == f"tandem-{name}"
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
