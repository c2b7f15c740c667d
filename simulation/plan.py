"""What `launch simulate` simulates: the fleet, its speed, what it costs before and behind the instances, and its load, as flags.

Owns names, defaults and limits. Imports nothing heavy, starts nothing. The defaults that stand for hardware are assumptions, for
a model of 8 billion parameters in bfloat16 on one H100 per instance; measure your own with `launch bench engine`.

    client ─► HTTP, template, tokenizing ─► router … instances … ─► detokenizer ─► router: events ─► client
              request_s + tokens * prompt_token_s                   token_s each   event_s each
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import msgspec

from common.config import DEMO_MODEL, PolicyName
from common.errors import ConfigError
from common.options import Switch, option, parse_numbers, refuse_without_effect, require, require_at_least, require_between
from common.ranges import Seconds
from common.step_cost import StepCost

if TYPE_CHECKING:
    from common.ids import Role  # its module imports numpy


MEASURE = "measure"
FRONT_COSTS = "0.001,0.000001,0.00001,0.00005"


class FrontCosts(msgspec.Struct, frozen=True):
    """Seconds of one core."""

    request_s: Seconds = 0.0
    """A request occupies its router."""
    prompt_token_s: Seconds = 0.0
    """A token of its prompt delays it, on a thread of its own."""
    token_s: Seconds = 0.0
    """A token of an answer occupies the detokenizer."""
    event_s: Seconds = 0.0
    """An event of a stream occupies the router, until its client has read it."""

    @classmethod
    def parse(cls, text: str) -> "FrontCosts":
        """Those that a flag spells as four numbers of seconds. Raises ConfigError."""
        rule = f"four numbers of seconds such as {FRONT_COSTS}, or {MEASURE}"
        costs = parse_numbers(text, "front", float, rule)
        require(len(costs) == 4 and all(0 <= cost < 1 for cost in costs), "front", rule, text)
        return cls(*costs)

    @property
    def spelled(self) -> str:
        """As the flag takes them."""
        return ",".join(f"{cost:.3g}" for cost in msgspec.structs.astuple(self))


Arrivals = Literal["poisson", "even"]
Lengths = Literal["exponential", "constant"]

_ABOVE_0 = (
    "rate", "requests", "speed", "mean_input", "mean_output", "kv_pages", "page_size", "kv_token_bytes", "context_tokens",
    "max_running", "chunk_tokens", "max_waiting", "max_requests", "link_gbit", "restart_s", "slo_ttft_s", "slo_itl_s",
    "turns", "long_input",
)  # fmt: skip
_WITHOUT_TRACE = (
    "rate", "requests", "arrivals", "lengths", "mean_input", "mean_output", "turns", "think_s", "system_tokens", "long_share",
    "long_input",
)  # fmt: skip
_AT_LEAST_0 = (
    "prefill", "begin_s", "duration_s",
    "link_latency_s", "message_s", "max_tokens", "kill_every_s", "seed", "think_s", "system_tokens",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """The fleet, and how fast its parts are assumed to be."""

    prefill: int = option(2, "number of prefill instances; 0 means colocated serving")
    decode: int = option(2, "number of decode instances")
    step_cost: str = option(
        "0.006,0.00004,0.0001",
        "assumed: seconds of a step (the time to read the weights), and what each prompt token, each decode row and, as a fourth "
        "number that may be left out, each token of KV that the rows hold adds",
    )
    decode_step_cost: str = option("", "assumed: that of decode instances, where theirs is another")
    kv_pages: int = option(28_000, "assumed: KV pages of an instance")
    page_size: int = option(16, "tokens per KV page")
    kv_token_bytes: int = option(131_072, "assumed: KV bytes of a token over all layers")
    context_tokens: int = option(131_072, "most tokens of prompt and answer together")
    max_running: int = option(256, "most requests computed at once by an instance")
    chunk_tokens: int = option(8192, "most prompt tokens computed in one forward")
    max_waiting: int = option(1024, "most requests that wait in an instance; more are refused")
    max_requests: int = option(100_000, "most requests in the system at once; more get status 429")
    prefix_cache: Switch = option("on", "on: instances keep the KV of prompts and answers while they have memory; off: never")
    link_gbit: float = option(400.0, "assumed: speed of an instance's link for KV, in each direction, in Gbit/s")
    link_latency_s: float = option(20e-6, "assumed: seconds that any write takes, whatever its size")
    message_s: float = option(200e-6, "assumed: seconds that any message takes")
    front: str = option(
        FRONT_COSTS,
        "assumed: seconds that a request occupies the router, that each token of a prompt delays it, that a token of an answer "
        f"occupies the detokenizer, and an event the router; {MEASURE}: measured on this machine before it begins",
    )
    front_model: str = option(DEMO_MODEL, f"with --front {MEASURE}: whose tokenizer and chat template")
    skip_steps: Switch = option(
        "off",
        "on: take the steps of a decode instance at once between which nothing happens: many times as fast, with the same times; "
        "its messages and CPU time are then less than they would be",
    )

    def __post_init__(self) -> None:
        _check(self)
        if not (self.cost("prefill").step_s and self.cost("decode").step_s):
            raise ConfigError(f"--step-cost: a step must take some time; it is {self.step_cost!r}")
        require_at_least(self, decode=1)
        require(self.kv_token_bytes % 2 == 0, "kv-token-bytes", "even (keys and values)", self.kv_token_bytes)
        if self.front != MEASURE:
            FrontCosts.parse(self.front)
            refuse_without_effect(self, ("front_model",), f"without --front {MEASURE}")

    def cost(self, role: "Role") -> StepCost:
        """What the steps of an instance cost."""
        return StepCost.parse(self.decode_step_cost if role == "decode" and self.decode_step_cost else self.step_cost)


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What is asked of the fleet, what happens to it, and what is reported."""

    trace: str = option(
        "", "file with the requests, in Mooncake's format: JSON lines with timestamp (ms), input_length, output_length, hash_ids"
    )
    speed: float = option(1.0, "with --trace: play it so many times as fast")
    begin_s: float = option(0.0, "with --trace: begin so many seconds into it, in its own time")
    duration_s: float = option(0.0, "send requests for so many simulated seconds; 0: all")
    rate: float = option(4.0, "without --trace: conversations that begin per second; each is one request unless --turns is more")
    requests: int = option(1000, "without --trace: how many conversations")
    arrivals: Arrivals = option("poisson", "without --trace: times between their beginnings, random (poisson) or equal (even)")
    lengths: Lengths = option("exponential", "without --trace: lengths vary around their means, or all equal them (constant)")
    mean_input: int = option(2000, "without --trace: mean prompt tokens that a turn adds")
    mean_output: int = option(200, "without --trace: mean answer tokens")
    turns: int = option(1, "without --trace: turns of a conversation; each prompt holds all prompts and answers before it")
    think_s: float = option(10.0, "with --turns: mean seconds from the end of an answer to the next turn; varies as --lengths do")
    system_tokens: int = option(0, "without --trace: tokens that all conversations begin with, ahead of their first prompt")
    long_share: float = option(0.0, "without --trace: this share of the turns adds --long-input tokens instead of --mean-input")
    long_input: int = option(16_000, "with --long-share: mean prompt tokens that such a turn adds")
    max_tokens: int = option(
        0, "max_tokens of every request, or what its context leaves: longer answers are cut off; 0: the length of its answer"
    )
    kill_every_s: float = option(0.0, "kill an instance at random about so often, in simulated seconds; 0: never")
    restart_s: float = option(60.0, "with --kill-every-s: seconds until a killed instance is there again")
    slo_ttft_s: float = option(2.0, "a good answer's first token comes within so many seconds")
    slo_itl_s: float = option(0.05, "and the mean time between its tokens is at most this, in seconds")
    seed: int = option(0, "of all that is random: the same seed gives the same report")
    progress: Switch = option("on", "say on stderr every few seconds how far the simulation is")
    json: str = option("", "write all figures to this file")

    def __post_init__(self) -> None:
        _check(self)
        if self.trace:
            refuse_without_effect(self, _WITHOUT_TRACE, "with --trace, which says which requests come when")
        else:
            refuse_without_effect(self, ("speed", "begin_s"), "without --trace")
        if self.turns == 1:
            refuse_without_effect(self, ("think_s",), "without --turns")
        if not self.long_share:
            refuse_without_effect(self, ("long_input",), "without --long-share")
        require_between(self, 0, 1, "long_share")
        if not self.kill_every_s:
            refuse_without_effect(self, ("restart_s",), "without --kill-every-s")


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """What is searched, and how far."""

    fleet_url: str = option(
        "",
        "URL of a running fleet's router: what its instances and links have measured takes the place of --step-cost, --kv-pages "
        "and their like, and without --trace its last hour is the load",
    )
    control_key: str = option("", "with --fleet-url: file with the control key of its router")
    devices: int = option(8, "how many devices there are; an instance of several ranks takes as many of them")
    rank_costs: tuple[str, ...] = option(
        (), "N=S,T,R[,H]: --step-cost of instances with N ranks, which are tried then; without it instances have one"
    )
    chunk_sizes: str = option("", "values of --chunk-tokens to try, such as 2048,8192; default: --chunk-tokens")
    policies: tuple[str, ...] = option((), "policies to try, of prefill and decode instances alike; default: least_loaded")
    attainment: float = option(0.9, "the share of requests that must keep both limits")
    seconds: float = option(60.0, "simulated seconds of the runs of the last round; those of the first are four times shorter")
    windows: int = option(3, "parts of the trace, or seeds, with which the last round is repeated; the interval is over them")
    jobs: int = option(0, "processes; 0: one for each core")
    page: str = option("plan.html", "write a page with the curves to this file; empty: none")

    def __post_init__(self) -> None:
        require_at_least(self, devices=1, seconds=8, windows=1, jobs=0)
        require(0 < self.attainment < 1, "attainment", "between 0 and 1", self.attainment)
        if not self.fleet_url:
            refuse_without_effect(self, ("control_key",), "without --fleet-url")
        _ = self.costs_of_ranks
        require(all(chunk >= 1 for chunk in self.chunks(1)), "chunk-sizes", "at least 1 each", self.chunk_sizes)
        known = get_args(PolicyName)
        require(set(self.policies) <= {*known}, "policies", f"some of {', '.join(known)}", " ".join(self.policies))

    @property
    def costs_of_ranks(self) -> dict[int, str]:
        """For each number of ranks, the step cost of an instance; "": that of the fleet."""
        costs: dict[int, str] = {}
        for given in self.rank_costs:
            ranks, _, cost = given.partition("=")
            is_valid = ranks.isdecimal() and 1 <= int(ranks) <= self.devices
            require(is_valid, "rank-costs", "N=S,T,R[,H] with N from 1 to --devices", given)
            StepCost.parse(cost)
            costs[int(ranks)] = cost
        return costs or {1: ""}

    @property
    def tried_policies(self) -> tuple[PolicyName, ...]:
        return cast("tuple[PolicyName, ...]", self.policies or ("least_loaded",))

    def chunks(self, default: int) -> tuple[int, ...]:
        return parse_numbers(self.chunk_sizes, "chunk-sizes", int) if self.chunk_sizes else (default,)


def _check(plan: FleetPlan | LoadPlan) -> None:
    """Raises ConfigError, which names the flag."""
    for name, value in vars(plan).items():
        require(name not in _ABOVE_0 or 0 < value < math.inf, name, "above 0", value)
        require(name not in _AT_LEAST_0 or 0 <= value < math.inf, name, "0 or more", value)
