"""Scenes: a fleet in which one request has been brought exactly into a phase of its life.

Owns the phases, each with what proves that the request is in it. What happens then, and what must come of it, is
`test_every_phase.py`'s to say.
"""

from collections.abc import Callable
from enum import Enum

from common.config import Dispatch, RouterConfig
from common.ids import InstanceId, RequestId, pack_ids
from common.messages import AnyMessage, Generate, Reserve
from common.sampling_params import SamplingParams
from common.step_cost import StepCost
from router.requests import RequestSpec
from simulation.clock import TURN_S
from simulation.network import DELAY_S, Letter
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet, World
from tests.life.ranks import ToyInstance, ToySize, transport_of

PROMPT = [100 + n for n in range(19)]
"""Three chunks of 8 tokens, five pages of 4."""
MAX_TOKENS = 12
OTHER_PROMPT = [300 + n for n in range(40)]
BRING_S = 2.0
"""Within which a phase is reached."""
SIZE = ToySize(rows=2, cost=StepCost(step_s=0.05, chunk_token_s=0.0, decode_row_s=0.0))
SLOW_GRANT_S = 1.0


class SlowGrants:
    """Letters from decode to prefill instances take as long as they are told to."""

    def __init__(self) -> None:
        self.seconds = DELAY_S

    def delays(self, sender: InstanceId, to: InstanceId, now: float, kind: str) -> tuple[float, ...]:
        return (self.seconds if sender.startswith("decode") and to.startswith("prefill") else DELAY_S,)


class Scene:
    """A fleet of two and two with a request in it, and others that came before and must not suffer.

    prefill, decode: the names of those who serve the request's latest attempt.
    """

    def __init__(self, dispatch: Dispatch, timeout_s: float | None) -> None:
        self.grants = SlowGrants()
        self.fleet = ToyFleet(2, 2, size=SIZE, config=RouterConfig(dispatch=dispatch), world=World(weather=self.grants))
        self.timeout_s = timeout_s
        self.others: list[tuple[Client, list[int]]] = []
        """And what they must be answered."""
        self.attempts = 0
        self.prefill, self.decode = "prefill-0", "decode-0"
        self.fleet.network.taps.append(self._follow)
        self.client = Client(RequestId("r"))

    def ask(self) -> None:
        """The request comes."""
        self.client = self.fleet.ask(_spec("r", PROMPT, MAX_TOKENS, self.timeout_s))

    def other(self, prompt: list[int], max_tokens: int) -> None:
        client = self.fleet.ask(_spec(f"other-{len(self.others)}", prompt, max_tokens, None))
        self.others.append((client, undisturbed(prompt, max_tokens)))

    @property
    def at_prefill(self) -> ToyInstance:
        return self.fleet.instances[self.prefill]

    @property
    def at_decode(self) -> ToyInstance:
        return self.fleet.instances[self.decode]

    def until(self, done: Callable[[], bool]) -> None:
        self.fleet.turn_until(done, BRING_S)

    def until_sent(self, sender: str, kind: str, to: str) -> None:
        self.until(lambda: (sender, kind, to) in self.fleet.network.log)

    def until_pushing(self, seconds: float = BRING_S) -> None:
        """A push of the prefill instance is held by its transport."""
        self.fleet.turn_until(lambda: self.at_prefill.scheduler.report().load.pushes_in_flight > 0, seconds)
        self.fleet.run_for(2 * TURN_S)

    def hold_pushes(self) -> None:
        self.fleet.memory.hold = True

    def let_pushes_go(self) -> None:
        self.fleet.memory.hold = False
        for instance in self.fleet.instances.values():
            transport_of(instance).release()

    def _follow(self, letter: Letter, message: AnyMessage, delays: tuple[float, ...]) -> None:
        if isinstance(message, Generate) and message.key.request_id == "r":
            self.attempts = message.key.attempt + 1
            if message.decodes:
                self.prefill, self.decode = letter.to, message.decodes[0]
            else:
                self.decode = letter.to
        if isinstance(message, Reserve) and message.key.request_id == "r":
            self.decode = letter.to


def _spec(name: str, prompt: list[int], max_tokens: int, timeout_s: float | None) -> RequestSpec:
    sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0.0)
    return RequestSpec(RequestId(name), 0, pack_ids(prompt), sampling, timeout_s=timeout_s)


# --- the phases ------------------------------------------------------------------------------------------------------------


def _waiting_at_prefill(scene: Scene) -> None:
    for _ in range(2):
        scene.other(OTHER_PROMPT, 4)
    scene.until(
        lambda: all(scene.fleet.instances[f"prefill-{n}"].scheduler.report().counters.prompt_tokens_computed for n in (0, 1))
    )
    scene.ask()
    scene.until(lambda: scene.at_prefill.scheduler.report().load.waiting_requests == 1)


def _computing_before_the_grant(scene: Scene) -> None:
    scene.grants.seconds = SLOW_GRANT_S
    scene.ask()
    scene.until_sent(scene.prefill, "Reserve", scene.decode)
    scene.grants.seconds = DELAY_S
    assert scene.at_prefill.scheduler.report().counters.prompt_tokens_computed == 0


def _computing_and_pushing(scene: Scene) -> None:
    scene.hold_pushes()
    scene.ask()
    scene.until_pushing()
    assert 0 < scene.at_prefill.scheduler.report().counters.prompt_tokens_computed < len(PROMPT)


def _first_token_out(scene: Scene) -> None:
    scene.hold_pushes()
    scene.ask()
    scene.until(lambda: len(scene.client.token_ids) == 1)
    scene.until_pushing()


def _handed_off(scene: Scene) -> None:
    scene.ask()
    scene.until_sent(scene.prefill, "Handoff", scene.decode)
    assert scene.at_decode.scheduler.report().load.reservations == 1


def _waiting_for_decode_memory(scene: Scene) -> None:
    for _ in range(2 * SIZE.rows):
        scene.other(OTHER_PROMPT[:3], 50)
    decodes = [scene.fleet.instances[f"decode-{n}"] for n in (0, 1)]
    scene.until(lambda: all(decode.scheduler.report().counters.handoffs == SIZE.rows for decode in decodes))
    scene.ask()
    scene.until(lambda: scene.at_decode.scheduler.report().load.waiting_requests == 1)


def _decoding(scene: Scene) -> None:
    scene.ask()
    scene.until(lambda: len(scene.client.token_ids) >= 4)


def _prefilled_by_a_decode_instance(scene: Scene) -> None:
    scene.ask()
    scene.until(lambda: scene.at_decode.scheduler.report().counters.prompt_tokens_computed > 0)
    assert not scene.client.token_ids


def _resumed(scene: Scene) -> None:
    _first_token_out(scene)
    dead = scene.fleet.kill(scene.prefill)
    scene.fleet.router_process.connection_broken(dead.name.id)
    scene.let_pushes_go()
    scene.until(lambda: len(scene.client.token_ids) >= 4)
    assert scene.attempts == 2


class Phase(Enum):
    """Where the request is. pushes: whether there is a transfer ahead."""

    WAITING_AT_PREFILL = ("waiting at prefill", _waiting_at_prefill, False)
    BEFORE_THE_GRANT = ("computing its first chunk before the grant", _computing_before_the_grant, True)
    PUSHING = ("computing with the grant and pushing", _computing_and_pushing, True)
    FIRST_TOKEN_OUT = ("first token out with the last push in flight", _first_token_out, True)
    HANDED_OFF = ("handed off and decode not started", _handed_off, False)
    WAITING_FOR_MEMORY = ("waiting for decode memory", _waiting_for_decode_memory, True)
    DECODING = ("decoding", _decoding, False)
    LOCAL = ("locally prefilled on a decode instance", _prefilled_by_a_decode_instance, False)
    RESUMED = ("resumed", _resumed, False)

    def __init__(self, title: str, bring: Callable[[Scene], None], pushes: bool) -> None:
        self.title = title
        self.bring = bring
        self.pushes = pushes

    def scene(self, timeout_s: float | None = None) -> Scene:
        """A scene in which the request is in this phase. timeout_s: of the request."""
        scene = Scene("colocated" if self is Phase.LOCAL else "auto", timeout_s)
        self.bring(scene)
        assert not scene.client.endings
        return scene
