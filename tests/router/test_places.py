"""How keys share the places for open requests, whatever order they come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Overloaded
from common.instance.waiting_line import SHARE
from router.requests import Places

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
