"""One request's life at the router's core: messages in, messages out, and exactly one ending. And how keys share the places for
open requests, whatever order they come in.
"""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import RouterConfig
from common.errors import Overloaded, Unavailable
from common.ids import DETOKENIZER, Digest, RequestId, pack_ids
from common.instance.ports import Send
from common.instance.waiting_line import SHARE
from common.messages import (
    Ending,
    ExpectAnswer,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    InstanceInfo,
    Load,
    Register,
    Terms,
)
from common.messages.variants import WeightsOnDisk
from common.sampling_params import SamplingParams
from router.requests import ChoiceDelta, Places, RequestSpec
from router.weights import SETTLE_S
from tests.builders import key
from tests.router.bench import D0, D1, P0, P1, PROMPT, Bench, cancels, close, generates, spec
from tests.router.fakes import flush, says

TERMS = Terms(timeout_s=1800.0)


# --- in ----------------------------------------------------------------------------------------------------------------


def test_a_request_is_announced_to_the_detokenizer_and_sent_to_the_prefill_instance_only() -> None:
    bench = Bench(P0, D0)
    sent = bench.submit(spec(stop=("end",)))
    assert sent == [
        Send(DETOKENIZER, ExpectAnswer(key=key(), stop=("end",), context=pack_ids(range(112, 120)), life_s=1860.0)),
        Send(
            P0.id,
            Generate(
                key=key(),
                prompt=PROMPT,
                sampling=SamplingParams(max_new_tokens=8),
                decodes=(D0.id,),
                terms=TERMS,
                incarnation=P0.incarnation,
            ),
        ),
    ]
    assert bench.assigned() == {"p0": 20, "d0": 20}


def test_a_request_carries_its_priority_its_age_its_owner_and_what_is_left_of_its_time() -> None:
    bench = Bench(P0, D0)
    asked = RequestSpec(RequestId("r"), 0, PROMPT, SamplingParams(max_new_tokens=8), priority=-3, timeout_s=20.0, owner="alice")
    bench.client.owner, bench.client.received_s = asked.owner, 1.0
    sent = bench.core.requests.submit(bench.client, [asked], now=1.5)
    ((_, generate),) = generates(sent)
    assert generate.terms == Terms(priority=-3, age_s=0.5, timeout_s=19.5, owner="alice")
    assert isinstance(sent[0].message, ExpectAnswer) and sent[0].message.life_s == 79.5
    bench.beat(20.0)
    assert bench.core.tick(20.9)[-1:] != [close()]
    assert bench.core.tick(21.0) == [*cancels(P0, D0), close()]
    (ending,) = bench.endings()
    assert isinstance(ending, Failed) and ending.status == 504 and "20 s" in ending.message


def test_the_choices_of_one_prompt_go_together_while_there_is_room_and_other_prompts_go_elsewhere() -> None:
    """Then the prompt is computed and pushed once. The memory of a decode instance is 256 tokens, and a choice takes 60."""
    bench = Bench(P0, D0, P1, D1)
    for each in (P0, D0, P1, D1):
        bench.report(each, 0.0, Load(pages_free=64, pages_total=64))
    same = [spec(f"{n}", n, max_new_tokens=40) for n in range(5)]
    sent = generates(bench.submit(*same, replace(spec("other", 5), prompt=pack_ids(range(20)))))
    assert [first for first, _ in sent] == [sent[0][0]] * 5 + [sent[5][0]] and sent[5][0] != sent[0][0]
    decodes = [message.decodes[0] for _, message in sent]
    assert decodes[:4] == [decodes[0]] * 4 and decodes[4] != decodes[0]


def test_beyond_max_requests_the_router_is_overloaded_and_nothing_is_dispatched() -> None:
    bench = Bench(P0, D0, config=RouterConfig(max_requests=2)).serving(spec("a"))
    with pytest.raises(Overloaded):
        bench.submit(spec("b"), spec("c"))
    assert len(bench.core.requests) == 1
    bench.submit(spec("b"))
    assert bench.core.unready() == ["all 2 places for requests are taken"]
    bench.core.requests.cancel([RequestId("a")], 1.0)
    assert bench.core.unready() == []


def test_a_request_whose_second_choice_cannot_be_placed_leaves_nothing_behind() -> None:
    bench = Bench(P0)
    with pytest.raises(Unavailable):
        bench.submit(spec("a", max_new_tokens=1), spec("b", max_new_tokens=2))
    assert (len(bench.core.requests), bench.assigned()) == (0, {"p0": 0})
    assert bench.core.requests.next_deadline() is None


# --- tokens ------------------------------------------------------------------------------------------------------------


def test_text_reaches_the_client_in_order_and_the_ending_comes_once(bench: Bench) -> None:
    assert bench.text(0, "H", now=1.0) == []
    assert bench.text(1, "el", now=1.5) == []
    assert bench.text(3, "lo", Finished(reason="length"), now=2.0) == []
    assert bench.client.take() == [
        ChoiceDelta(0, "H", (72,)),
        ChoiceDelta(0, "el", (101, 108)),
        ChoiceDelta(0, "lo", (108, 111), Finished(reason="length")),
    ]
    assert bench.text(5, "!", Finished(reason="stop")) == []
    assert (bench.client.take(), bench.core.requests.stale) == ([], 1)
    assert bench.observer.endings == [Finished(reason="length")]
    assert bench.observer.first_tokens == [1.0]
    assert bench.observer.gaps == [(0.5, 2), (0.5, 2)]


def test_tokens_that_came_already_are_dropped_and_counted(bench: Bench) -> None:
    bench.text(0, "ab")
    bench.text(1, "b")
    bench.text(2, "c")
    assert (bench.read(), bench.core.requests.stale) == ("abc", 1)


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (Finished(reason="stop", matched="end"), cancels(P0, D0, complete=True)),
        (Finished(reason="stop", matched=7), []),
        (Failed(message="the push failed"), cancels(P0, D0)),
    ],
    ids=["a stop string, which instances do not know", "a stop token, which they know", "a failure at one of them"],
)
def test_an_ending_is_told_to_the_instances_that_do_not_know_it(bench: Bench, ending: Ending, told: list[Send]) -> None:
    assert bench.text(0, "a", ending) == told
    assert bench.endings() == [ending]


# --- out ---------------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_cancels_everywhere_once(bench: Bench) -> None:
    bench.text(0, "a")
    assert bench.core.requests.cancel([RequestId("r")], 2.0) == [*cancels(P0, D0), close()]
    assert bench.core.requests.cancel([RequestId("r")], 2.0) == []
    assert bench.observer.endings == [Finished(reason="cancelled")]


def test_a_client_that_does_not_read_is_given_up() -> None:
    bench = Bench(P0, D0, limit_chars=100).serving(spec(max_new_tokens=100))
    assert bench.text(0, "x" * 60) == []
    assert bench.text(60, "y" * 60) == [*cancels(P0, D0), close()]
    (ending,) = bench.endings()
    assert isinstance(ending, Failed) and ending.kind == "slow_client"


# --- places ---------------------------------------------------------------------------------------------------------------------


LIMIT = 100


def fill(places: Places, *owners: str) -> dict[str, int]:
    """The owners take places in turn until nobody gets one. Returns how many each got."""
    got = dict.fromkeys(owners, 0)
    willing = list(owners)
    while willing:
        for owner in list(willing):
            try:
                places.take(owner)
                got[owner] += 1
            except Overloaded:
                willing.remove(owner)
    return got


def test_without_keys_all_places_can_be_taken_and_one_more_is_refused_with_the_numbers() -> None:
    places = Places(LIMIT, "requests")
    assert fill(places, "") == {"": LIMIT}
    with pytest.raises(Overloaded, match="100 of at most 100 requests open"):
        places.take("")


def test_a_key_that_floods_leaves_places_for_one_that_comes_later_and_then_both_get_the_same() -> None:
    places = Places(LIMIT, "requests")
    flood = fill(places, "a")["a"]
    assert flood == pytest.approx(LIMIT * SHARE / (SHARE + 1), abs=1)
    late = fill(places, "b")["b"]
    assert 0 < late < flood
    for _ in range(LIMIT):  # one of `a` ends, and both want the free place
        places.leave("a")
        fill(places, "a", "b")
    shares = dict(places.of_keys())
    assert abs(shares["a"] - shares["b"]) <= SHARE, shares


def test_who_wants_less_than_its_share_gets_all_of_it_and_the_rest_is_shared_equally() -> None:
    places = Places(LIMIT, "requests")
    places.take("small", 5)
    shares = fill(places, "a", "b")
    assert len(places) > LIMIT * 0.8 and abs(shares["a"] - shares["b"]) <= 1
    places.take("small", 3)


def test_many_choices_at_once_are_judged_as_if_they_came_one_by_one() -> None:
    places, whole = Places(LIMIT, "requests"), Places(LIMIT, "requests")
    most = fill(places, "a")["a"]
    with pytest.raises(Overloaded, match="your key has 0 requests open"):
        whole.take("a", most + 1)
    whole.take("a", most)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 12), st.booleans()), max_size=200))
def test_a_key_with_nothing_open_is_let_in_while_any_place_is_free_and_never_more_than_all_are_taken(
    events: list[tuple[str, int, bool]],
) -> None:
    places, model = Places(20, "requests"), dict.fromkeys("abcdefgh", 0)
    for owner, count, is_ending in events:
        if is_ending:
            ended = min(count, model[owner])
            places.leave(owner, ended)
            model[owner] -= ended
            continue
        try:
            places.take(owner, count)
            model[owner] += count
        except Overloaded:
            assert count > 1 or model[owner] >= SHARE or sum(model.values()) == 20
    assert len(places) == sum(model.values()) <= 20
    if len(places) < 20:
        places.take("newcomer")


# --- another router changes the weights of the fleet ---------------------------------------------------------------------


def reports(bench: Bench, member: InstanceInfo, weights: str, now: float) -> list[Send]:
    """A heartbeat says what the member computes with."""
    others = (other for other in bench.members if other.role != member.role)
    sends: list[Send] = []
    for said in says(bench.core.fleet, member, *others):
        if isinstance(said, Heartbeat):
            said = msgspec.structs.replace(said, weights=Digest(weights))
        sends += bench.core.receive(said, now)
    return bench.place(sends, now)


def half_changed() -> Bench:
    """One of two members has the weights that another router gives them."""
    bench = Bench()
    bench.members = [P0, D0]
    for member in bench.members:
        bench.core.receive(Register(instance=member, weights=Digest("old")), 0.0)
    flush(bench.core.fleet, 0.0)
    for member in (P0, D0, P0, D0):
        reports(bench, member, "old", 0.1)
    reports(bench, D0, "new", 1.0)
    return bench


def test_a_request_that_comes_while_another_router_changes_the_weights_waits_and_is_placed_when_this_one_follows() -> None:
    bench = half_changed()
    assert bench.core.unready() == [] and "requests wait: " in bench.core.degraded()[0]
    assert generates(bench.submit(spec(), at=1.0)) == [], "half of the members is not more than half"
    assert len(generates(reports(bench, P0, "new", 1.1))) == 1
    assert bench.core.degraded() == []


def test_an_instance_with_other_weights_than_the_fleet_keeps_nobody_waiting() -> None:
    """It joined with them, so no other router has changed them."""
    bench = Bench()
    bench.members = [P0, D0]
    bench.core.receive(Register(instance=P0, weights=Digest("old")), 0.0)
    reports(bench, P0, "old", 0.1)
    bench.core.fleet.weights._source = WeightsOnDisk("old")
    bench.core.receive(Register(instance=D0, weights=Digest("other")), 0.2)
    reports(bench, D0, "other", 0.3)
    (reason,) = bench.core.unready()
    assert "d0 is updating" in reason
    with pytest.raises(Unavailable, match="d0 is updating"):
        bench.submit(spec(), at=1.0)


def test_a_request_that_waits_while_weights_settle_waits_on_in_a_pause() -> None:
    bench = half_changed()
    bench.submit(spec(), at=1.0)
    bench.core.fleet.weights.pause(holds_steps=False)
    bench.core.requests.tick(20.0, {DETOKENIZER: 20.0})
    assert len(bench.core.requests) == 1 and bench.client.take() == []


def test_weights_that_stay_different_keep_requests_waiting_for_a_while_only() -> None:
    bench = half_changed()
    assert bench.core.unready() == []
    reports(bench, D0, "new", 1.0 + SETTLE_S)
    assert "d0 is updating" in bench.core.unready()[0]
    with pytest.raises(Unavailable, match="d0 is updating"):
        bench.submit(spec(), at=1.0 + SETTLE_S)
