"""Every phase of a request's life, and everything that can befall it there: one ending, the right tokens, every page at home.

A scene is a fleet of two and two in which a request has been brought exactly into a phase. Then one thing happens. The request is
served to its end all the same, if its client still wants it and its time has not passed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from common.config import RouterConfig
from common.engine.timed import StepCost
from common.ids import InstanceId, RequestId, pack_ids
from common.messages import AnyMessage, Ending, Failed, Finished
from common.sampling_params import SamplingParams
from kv_transfer.lease import LEASE_S, MARGIN_S
from router.requests import RequestSpec
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import Fleet, World
from tests.life.instance import Instance, Size
from tests.life.network import DELAY_S, Letter

PROMPT = [100 + n for n in range(19)]
"""Three chunks of 8 tokens, five pages of 4."""
MAX_TOKENS = 12
LONG_PROMPT = [300 + n for n in range(40)]
STEP_S = 0.05
TIMEOUT_S = 2.4
"""Of the request: longer than any phase takes to bring about, and not so long that a stopped instance is given up."""
SETTLE_S = LEASE_S + MARGIN_S + 30.0
SIZE = Size(rows=2, cost=StepCost(step_s=STEP_S, chunk_token_s=0.0, decode_row_s=0.0))


class SlowGrants:
    """Letters from decode to prefill instances take long, if they are told to."""

    def __init__(self) -> None:
        self.grant_s = DELAY_S

    def delays(self, sender: InstanceId, to: InstanceId, now: float) -> tuple[float, ...]:
        return (self.grant_s if sender.startswith("decode") and to.startswith("prefill") else DELAY_S,)


@dataclass(slots=True)
class Scene:
    """A fleet and a request in it; others came before it, which must not suffer. prefill, decode: who has the request."""

    fleet: Fleet
    weather: SlowGrants
    client: Client | None = None
    others: tuple[tuple[Client, list[int]], ...] = ()
    prefill: str = "prefill-0"
    decode: str = "decode-0"

    def ask(self) -> Client:
        """The request comes."""
        self.client = self.fleet.ask(spec("r", PROMPT, MAX_TOKENS, TIMEOUT_S))
        return self.client

    def other(self, name: str, prompt: list[int], max_tokens: int) -> None:
        client = self.fleet.ask(spec(name, prompt, max_tokens, None))
        self.others += ((client, undisturbed(prompt, max_tokens)),)

    @property
    def at_prefill(self) -> Instance:
        return self.fleet.instances[self.prefill]

    @property
    def at_decode(self) -> Instance:
        return self.fleet.instances[self.decode]

    def until(self, done: Callable[[], bool]) -> None:
        self.fleet.turn_until(done, seconds=TIMEOUT_S)

    def sent(self, sender: str, kind: str, to: str) -> bool:
        return (sender, kind, to) in self.fleet.network.log
