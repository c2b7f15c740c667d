"""Timelines: each thing happens to a request in order, and takes as long as the clock of the fleet says.

The clock is turned by hand and steps have a known cost, so the lengths of prompt and answer say what a timeline must be.
"""

from collections import Counter
from random import Random

import pytest

from common.ids import InstanceId, RequestId, Role
from common.messages import Times
from common.step_cost import StepCost
from router.timelines import AttemptTimeline, RequestTimes, ResumeReason
from simulation.clock import TURN_S
from simulation.network import DELAY_S
from tests.life.checks import disordered
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToyInstance, ToySize

STEP_S, CHUNK_TOKEN_S, ROW_S = 0.002, 0.010, 0.001
SIZE = ToySize(cost=StepCost(step_s=STEP_S, chunk_token_s=CHUNK_TOKEN_S, decode_row_s=ROW_S))
CHUNKS, CHUNK_S, DECODE_S = 3, STEP_S + 8 * CHUNK_TOKEN_S, STEP_S + ROW_S
PROMPT = list(range(10, 10 + 8 * CHUNKS))
TURN = 1.5 * TURN_S
"""Who waits for something sees it this much later at most."""
TOLD_S = 2.0
"""Within which every instance has sent a heartbeat."""


def timeline_of(fleet: ToyFleet, name: str) -> RequestTimes:
    (found,) = fleet.router.requests.timelines.find(name)
    return found


def times_of(attempt: AttemptTimeline, role: Role) -> Times:
    """What its instance of this role has told."""
    (times,) = (each.times for each in attempt.instances if each.role == role)
    return times


def ask(fleet: ToyFleet, max_tokens: int) -> RequestTimes:
    """A request is served to its end, and instances have told of it."""
    client = fleet.submit("r", PROMPT, max_tokens)
    fleet.router.requests.timelines.name({"r": [RequestId("r")]})
    fleet.run(client)
    fleet.run_for(TOLD_S)
    return timeline_of(fleet, "r")


def test_an_open_request_shows_how_many_tokens_its_client_has() -> None:
    fleet = ToyFleet()
    client = fleet.submit("r", PROMPT, max_tokens=50)
    fleet.router.requests.timelines.name({"r": [RequestId("r")]})
    fleet.turn_until(lambda: len(client.token_ids) >= 20)
    assert timeline_of(fleet, "r").tokens == len(client.token_ids) < 50
    fleet.run(client)
    assert timeline_of(fleet, "r").tokens == len(client.token_ids) == 50


def test_each_thing_happens_in_its_order_and_takes_as_long_as_its_steps() -> None:
    fleet = ToyFleet(prefill=0, decode=1, size=SIZE)
    fleet.start("prefill-0", "prefill", began_s=1_000.0)  # its own clock began at another moment
    fleet.turn_until(lambda: any(member.usable for member in fleet.router.fleet.members("prefill")))
    request = ask(fleet, max_tokens=6)
    (attempt,) = request.attempts
    assert sorted((each.id, each.role) for each in attempt.instances) == [("decode-0", "decode"), ("prefill-0", "prefill")]
    prefill, decode = times_of(attempt, "prefill"), times_of(attempt, "decode")
    assert list(disordered(request)) == []
    across = [request.received_s, attempt.dispatched_s, prefill.accepted_s, prefill.asked_s, decode.accepted_s, decode.granted_s]
    across += [prefill.granted_s, attempt.placed_s, prefill.last_chunk_s, request.first_token_s]
    assert across == sorted(each for each in across if each is not None), "one after the other on the clocks of three processes"
    assert None not in (prefill.pushed_s, prefill.handed_off_s, decode.first_decode_s, request.last_token_s, attempt.placed_s)
    assert (prefill.prompt_tokens, prefill.pages_had, prefill.pages_pushed, decode.pages_pushed) == (24, 0, 6, 6)
    assert (request.tokens, request.ending) == (6, "length")

    def took(begin: float | None, end: float | None) -> float:
        assert begin is not None and end is not None
        return end - begin

    assert took(prefill.first_chunk_s, prefill.last_chunk_s) == pytest.approx(CHUNKS * CHUNK_S, abs=TURN)
    assert took(prefill.first_chunk_s, prefill.first_push_s) == pytest.approx(CHUNK_S, abs=TURN), "it was granted meanwhile"
    assert took(prefill.last_chunk_s, prefill.pushed_s) >= 0, "the last pages are complete with the last chunk"
    assert took(decode.handed_off_s, decode.first_decode_s) == pytest.approx(DECODE_S, abs=2 * TURN)
    assert took(decode.first_decode_s, decode.ended_s) == pytest.approx((6 - 2) * DECODE_S, abs=TURN)
    assert took(prefill.handed_off_s, decode.handed_off_s) == pytest.approx(DELAY_S, abs=TURN)
    second, first = sorted(fleet.observer.durations, key=lambda each: each.prefill_s or 0.0)
    assert first.prefill_s == pytest.approx(CHUNKS * CHUNK_S, abs=TURN)
    assert first.queue_s == pytest.approx(0.0, abs=TURN) and (first.decode_s, second.prefill_s) == (None, None)
    assert (first.exposed_transfer_s, second.transfer_s) == (took(prefill.last_chunk_s, prefill.handed_off_s), None)
    assert first.transfer_s == took(prefill.first_push_s, prefill.handed_off_s), "the grant came before the first chunk"
    assert second.decode_s == pytest.approx((6 - 1) * DECODE_S, abs=2 * TURN)


def test_a_prompt_that_waits_for_memory_queues_until_the_one_before_it_has_left() -> None:
    fleet = ToyFleet(size=ToySize(pages=8, cost=SIZE.cost))
    clients = [fleet.submit(name, PROMPT, 2) for name in ("first", "second")]
    fleet.router.requests.timelines.name({name: [RequestId(name)] for name in ("first", "second")})
    fleet.run(*clients)
    fleet.run_for(TOLD_S)
    before, behind = (times_of(timeline_of(fleet, name).attempts[0], "prefill") for name in ("first", "second"))
    assert behind.admitted_s is not None and before.last_chunk_s is not None
    assert behind.admitted_s >= before.last_chunk_s, "it has the pages of the other"
    queued_s = max(each.queue_s or 0.0 for each in fleet.observer.durations)
    assert queued_s == behind.admitted_s - behind.accepted_s >= CHUNKS * CHUNK_S


def test_what_the_prefix_cache_has_of_a_prompt_is_told_and_takes_no_time() -> None:
    fleet = ToyFleet(size=SIZE)
    fleet.run(fleet.submit("before", PROMPT, 2))
    (attempt,) = ask(fleet, max_tokens=2).attempts
    prefill, decode = times_of(attempt, "prefill"), times_of(attempt, "decode")
    assert prefill.cached_tokens == decode.cached_tokens > 0
    assert prefill.pages_had is not None and decode.pages_had == prefill.pages_had
    assert prefill.pages_pushed == decode.pages_pushed == 6 - prefill.pages_had < 6
    assert prefill.first_chunk_s is not None and prefill.last_chunk_s is not None
    computed_s = STEP_S + (len(PROMPT) - prefill.cached_tokens) * CHUNK_TOKEN_S
    assert prefill.last_chunk_s - prefill.first_chunk_s == pytest.approx(computed_s, abs=TURN) and computed_s < CHUNK_S


def test_where_one_instance_does_both_it_tells_of_prefill_and_decode_and_of_no_transfer() -> None:
    fleet = ToyFleet(prefill=0, size=SIZE)
    (told,) = ask(fleet, max_tokens=6).attempts[0].instances
    (durations,) = fleet.observer.durations
    assert durations.prefill_s == pytest.approx(CHUNKS * CHUNK_S, abs=TURN)
    assert durations.decode_s == pytest.approx((6 - 1) * DECODE_S, abs=TURN)
    assert (durations.transfer_s, durations.exposed_transfer_s, told.times.handed_off_s) == (None, None, None)


def test_a_resume_is_another_attempt_that_says_why() -> None:
    fleet = ToyFleet(decode=2, size=SIZE)
    client = fleet.submit("r", PROMPT, 20)
    fleet.router.requests.timelines.name({"r": [RequestId("r")]})
    fleet.turn_until(lambda: len(client.token_ids) > 4)
    request = timeline_of(fleet, "r")
    lost = request.attempts[0].decode
    assert lost is not None and request.ending is None and request.ended_s is None
    fleet.kill(lost)
    fleet.connection_broken(lost)
    fleet.run(client)
    fleet.run_for(TOLD_S)
    first, second = request.attempts
    assert (first.resume_reason, lost in (first.failure or ""), second.resume_reason) == (ResumeReason.LOST_INSTANCE, True, None)
    assert second.decode not in (None, lost)
    assert [each.id for each in first.instances] == ["prefill-0"], "who died tells nothing"
    assert {each.id for each in second.instances} == {"prefill-0", second.decode}
    assert times_of(second, "prefill").prompt_tokens > times_of(first, "prefill").prompt_tokens == len(PROMPT)
    assert list(disordered(request)) == [] and request.tokens == 20


def test_an_instance_that_leaves_tells_of_its_last_requests() -> None:
    fleet = ToyFleet(decode=2, size=SIZE)
    client = fleet.submit("r", PROMPT, 20)
    fleet.turn_until(lambda: len(client.token_ids) > 4)
    request = fleet.router.requests.timelines._requests.get(RequestId("r"))
    assert request is not None
    leaving = request.attempts[0].decode
    assert leaving is not None
    fleet.instances[leaving].drain()
    fleet.turn_until(lambda: leaving not in fleet.instances)
    fleet.run_for(2 * DELAY_S)
    assert leaving in [each.id for each in request.attempts[0].instances]


@pytest.mark.parametrize("seed", range(4))
def test_every_instance_tells_once_of_each_request_that_has_left_it(seed: int) -> None:
    random = Random(seed)
    fleet = ToyFleet(prefill=2, decode=2, routers=2, size=ToySize(pages=40, rows=3))
    clients = []
    for number in range(30):
        prompt = [random.randrange(10, 1000) for _ in range(random.randrange(1, 45))]
        clients.append(fleet.submit(f"r{number}", prompt, random.randrange(1, 16)))
        for _ in range(random.randrange(6)):
            fleet.clock.turn()
        if random.random() < 0.3:
            fleet.leave(f"r{random.randrange(number + 1)}")
    fleet.run(*clients)
    fleet.run_for(TOLD_S)
    told: Counter[InstanceId] = Counter()
    requests = [fleet.router.requests.timelines._requests.get(RequestId(f"r{number}")) for number in range(30)]
    for request in requests:
        assert request is not None and list(disordered(request)) == []
        told.update(each.id for attempt in request.attempts for each in attempt.instances)
    assert told == {name: left_of(instance) for name, instance in fleet.instances.items()}
    assert len(fleet.observer.durations) == told.total() > 0


def left_of(instance: ToyInstance) -> int:
    """How many requests have left it."""
    return instance.scheduler.report().counters.requests_ended
