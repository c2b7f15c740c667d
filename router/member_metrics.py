"""The instances' metrics: a line of text for each figure that an instance last reported, in the Prometheus text format.

Owns the names (prefix `tandem_instance_`) and the text. A thousand instances report 32,000 figures: each would cost the client
library ten microseconds, and costs a fraction of one here. Figures of pairs are not here: there are too many. Does not know HTTP.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Literal, get_args

from common.messages import Counters, LinkState, Load
from router.members import Member

Kind = Literal["gauge", "counter"]
STATES: tuple[LinkState, ...] = get_args(LinkState)


async def member_metrics(members: Iterable[Member]) -> bytes:
    """Every metric of these members, as they are now. The loop turns between two metrics."""
    there = list(members)
    labels = [f'instance="{_escaped(member.info.id)}",role="{member.info.role}"' for member in there]
    # A report is never changed, only replaced: all metrics tell of the same moment.
    loads, counters = [member.load for member in there], [member.counters for member in there]
    links = [_links_by_state(member) for member in there]
    up = [int(member.trouble is None) for member in there]

    what = "1 for a member that takes requests, 0 for one that drains, is stuck or has too many pages quarantined."
    parts = [_family("gauge", "tandem_instance_up", what, labels, up)]
    with_state = [f'{one},state="{state}"' for one in labels for state in STATES]
    counts = [of[state] for of in links for state in STATES]
    what = "Links by state, as reported by the instance that pushes."
    parts.append(_family("gauge", "tandem_instance_links", what, with_state, counts))
    for field in Load.__struct_fields__:
        await asyncio.sleep(0)
        values = list(map(attrgetter(field), loads))
        parts.append(_family("gauge", f"tandem_instance_{field}", "As reported by the instance.", labels, values))
    for field in Counters.__struct_fields__:
        await asyncio.sleep(0)
        values = list(map(attrgetter(field), counters))
        what = "As reported by the instance since it started."
        parts.append(_family("counter", f"tandem_instance_{field}_total", what, labels, values))
    return "".join(parts).encode()


def _family(kind: Kind, name: str, what: str, labels: Sequence[str], values: Sequence[float]) -> str:
    """One metric: a value for each set of labels."""
    lines = [f"{name}{{{one}}} {value}\n" for one, value in zip(labels, values, strict=True)]
    return f"# HELP {name} {what}\n# TYPE {name} {kind}\n" + "".join(lines)


def _links_by_state(member: Member) -> Counter[LinkState]:
    return Counter(member.links.values())


def _escaped(value: str) -> str:
    """As a label's value must be written."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
