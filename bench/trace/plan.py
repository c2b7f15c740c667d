"""What `launch bench trace` records: its flags and their limits.

Owns names, defaults and limits. Imports nothing heavy, starts nothing.
"""

import math
import shlex
from dataclasses import dataclass, fields, replace
from urllib.parse import urlsplit

from bench.serve.plan import Load, ServeBench, Target, Workload
from common.errors import ConfigError
from common.options import Switch, option, refuse_without_effect, require

DECIDED_BY_TRACE = ("num_prompts", "request_rate", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
"""Flags of `launch bench serve` that this one has not: it sets them itself."""
OF_OWN_FLEET = ("fleet", "rate")
MOST_S = 600.0


@dataclass(frozen=True, kw_only=True)
class TraceBench:
    """Which fleet is recorded, and for how long."""

    url: str = option("", "URL of a router of a running fleet, which gets no load; default: a fleet is started, and sent one")
    control_key: str = option("", "the file with the control key of that router, if it has one")
    insecure: Switch = option("off", "do not verify the certificate of an https router")
    fleet: str = option("--prefill 1 --decode 1", "FLAGS of `launch local`, in quotes: the fleet to start")
    rate: float = option(2.0, "requests a second that it is sent")
    seconds: float = option(60.0, "how long to record, at most ten minutes")
    out: str = option("trace.json.gz", "the file that https://ui.perfetto.dev opens")

    def __post_init__(self) -> None:
        require(0 < self.seconds <= MOST_S, "seconds", f"above 0 and at most {MOST_S:g}", self.seconds)
        require(0 < self.rate < math.inf, "rate", "above 0", self.rate)
        require(self.out.endswith(".gz"), "out", "a name that ends with .gz, because the file is compressed", self.out)
        if self.url:
            refuse_without_effect(self, OF_OWN_FLEET, "with --url")
            parts = urlsplit(self.url)
            require(parts.scheme in ("http", "https") and bool(parts.hostname), "url", "http://host:port", self.url)
        else:
            refuse_without_effect(self, ("control_key", "insecure"), "without --url")
        _ = self.fleet_flags

    @property
    def fleet_flags(self) -> tuple[str, ...]:
        try:
            return tuple(shlex.split(self.fleet))
        except ValueError as error:
            raise ConfigError(f"--fleet: the quotes of {self.fleet!r} do not match: {error}") from None


def load_bench(bench: TraceBench, workload: Workload, load: Load, url: str) -> ServeBench:
    """The load on the fleet at this URL."""
    if workload.dataset_name != "trace":
        workload = replace(workload, num_prompts=max(1, round(bench.rate * bench.seconds)))
        load = replace(load, request_rate=bench.rate)
    return ServeBench(target=Target(base_url=url), workload=workload, load=load)


def check_load(bench: TraceBench, workload: Workload, load: Load) -> None:
    """Raises ConfigError for flags of a load that nobody sends."""
    for config in (workload, load) if bench.url else ():
        names = [field.name for field in fields(config) if field.name not in DECIDED_BY_TRACE]
        refuse_without_effect(config, names, "with --url: a running fleet gets no load")
