"""Late choice in whole fleets: a request goes where there is room when its prompt is computed, and what is lost on the way costs
neither an attempt nor a page."""

from dataclasses import dataclass, field

from common.ids import ROUTER, InstanceId
from common.messages import AnyMessage, Placed, Reserve
from common.step_cost import StepCost
from router.timelines import ResumeReason
from simulation.network import DELAY_S, Letter
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet, World
from tests.life.ranks import ToySize

PROMPT = [100 + n for n in range(19)]
SIZE = ToySize(rows=2, cost=StepCost(step_s=0.05, chunk_token_s=0.0, decode_row_s=0.0))
P, D0, D1 = InstanceId("prefill-0"), InstanceId("decode-0"), InstanceId("decode-1")


@dataclass(slots=True)
class Gaps:
    """Letters from one to another are lost until a time."""

    until_s: dict[tuple[InstanceId, InstanceId], float] = field(default_factory=dict)

    def delays(self, sender: InstanceId, to: InstanceId, now: float, kind: str) -> tuple[float, ...]:
        return () if now < self.until_s.get((sender, to), 0.0) else (DELAY_S,)


class Scene:
    """A prefill instance, two decode instances, and a request. asked: to whom its Reserves went, and whether it waits there.
    placed: who has granted, as the prefill instance said. It does not matter whether the router heard it."""

    def __init__(self, size: ToySize = SIZE) -> None:
        self.gaps = Gaps()
        self.fleet = ToyFleet(1, 2, size=size, world=World(weather=self.gaps))
        self.asked: list[tuple[InstanceId, bool]] = []
        self.placed: list[InstanceId] = []
        self.fleet.network.taps.append(self._follow)

    def ask(self, max_tokens: int = 12) -> Client:
        self.answer = undisturbed(PROMPT, max_tokens)
        return self.fleet.submit("r", PROMPT, max_tokens)

    def lose(self, sender: InstanceId, to: InstanceId, seconds: float) -> None:
        self.gaps.until_s[sender, to] = self.fleet.clock.now + seconds

    def known_decode(self) -> str | None:
        """Who decodes, as the router knows it."""
        (record,) = self.fleet.router.requests.records()
        assert record.attempt is not None
        return None if record.attempt.decode is None else record.attempt.decode.info.id

    def finish(self, client: Client, *resumes: ResumeReason) -> None:
        """The request is answered as it must be, after these resumes, and everything comes home."""
        self.fleet.turn_until(lambda: client.ended, 30.0)
        self.fleet.turn_until(self.fleet.is_home, 30.0)
        assert client.token_ids == self.answer
        assert self.fleet.observer.resumes == list(resumes)

    def _follow(self, letter: Letter, message: AnyMessage, delays: tuple[float, ...]) -> None:
        if isinstance(message, Reserve) and message.key.request_id == "r":
            self.asked.append((letter.to, message.waits))
        if isinstance(message, Placed) and message.key.request_id == "r":
            self.placed.append(message.decode.id)


def test_a_request_goes_where_there_is_room_by_the_time_that_its_prompt_is_computed() -> None:
    """The candidate with the fewest tokens at dispatch has its only row taken for longest: the request does not wait for it."""
    scene = Scene(ToySize(rows=1, chunk_tokens=8, cost=SIZE.cost))
    fleet = scene.fleet
    short = fleet.submit("short", [300] * 60, 6)
    fleet.turn_until(lambda: len(short.token_ids) > 1)
    long = fleet.submit("long", [400], 40)
    fleet.turn_until(lambda: len(long.token_ids) > 1)
    queued_behind = fleet.submit("ahead", [500] * 50, 1)
    client = scene.ask()
    fleet.turn_until(lambda: bool(scene.placed))
    assert short.ended and queued_behind.ended and not long.ended
    (best, _), (other, _) = scene.asked[0], scene.asked[-1]
    assert [waits for _, waits in scene.asked] == [False, False] and best != other
    assert scene.placed == [other]
    fleet.turn_until(lambda: len(client.token_ids) > 1)
    assert len(long.token_ids) < 60, "it did not wait for the longer answer"
    fleet.run(long)
    scene.finish(client)


def test_a_request_for_which_nobody_has_room_waits_where_it_was_best() -> None:
    scene = Scene(ToySize(rows=1, cost=SIZE.cost))
    others = [scene.fleet.submit(f"other-{n}", [300 + n], 20) for n in range(2)]
    scene.fleet.turn_until(lambda: all(len(other.token_ids) > 1 for other in others))
    client = scene.ask()
    scene.fleet.turn_until(lambda: len(scene.asked) == 3)
    (best, _), (second, _), last = scene.asked
    assert best != second and last == (best, True)
    scene.finish(client)


def test_a_request_that_waits_at_its_best_candidate_goes_where_room_comes_earlier() -> None:
    """The best candidate has the longer answer to finish. The other one soon has nothing to do."""
    scene = Scene(ToySize(rows=1, cost=SIZE.cost))
    fleet = scene.fleet
    short = fleet.submit("short", [300] * 70, 6)
    long = fleet.submit("long", [400], 70)
    fleet.turn_until(lambda: len(short.token_ids) > 1 and len(long.token_ids) > 1)
    client = scene.ask()
    fleet.turn_until(lambda: len(scene.asked) == 3)
    (best, _), (other, _), _ = scene.asked
    fleet.turn_until(lambda: bool(scene.placed), 30.0)
    assert short.ended and not long.ended and scene.placed == [other] != [best]
    fleet.run(long)
    scene.finish(client)


def test_a_lost_placed_is_healed_by_the_second_token_and_the_loss_of_who_decodes_is_noticed() -> None:
    scene = Scene()
    client = scene.ask()
    scene.fleet.turn_until(lambda: bool(scene.asked))
    scene.lose(P, ROUTER, 0.1)
    scene.fleet.turn_until(lambda: len(client.token_ids) == 1)
    assert len(scene.placed) == 1 and scene.known_decode() is None
    scene.fleet.turn_until(lambda: len(client.token_ids) == 3)
    assert scene.known_decode() == scene.placed[0]
    scene.fleet.kill(scene.placed[0])
    scene.fleet.router_process.connection_broken(scene.placed[0])
    scene.finish(client, ResumeReason.LOST_INSTANCE)
