"""Admission: whose turn it is, whether its request fits, and who gives up room for it. Asked once for each step.

Owns the rules that both roles share. What room there is, and who may give it up, a role says through `Room`. Sends and ends
nothing.

Requests are admitted in the order of their turns (`common/instance/waiting_line.py`), but one that fits may pass one that does
not. Once a request has waited PATIENCE_S, nobody passes it any more whose turn is later. Room is shared by max-min fairness: an
owner alone may have everything, and gives up what is more than its part when another one that has less waits. Until that room is
free, nobody passes the one that waits for it. Where all requests have one owner, none of this changes anything.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import Protocol, TypeAlias, TypeVar

from common.errors import Preempted
from common.ids import InstanceId
from common.instance.request import Request
from common.instance.requests import RequestTable
from common.messages import Failed

LOOKED_AT = 32
"""How many requests that do not fit are looked at in a step, divided among their owners: the line may be long."""

R = TypeVar("R", bound=Request)
Part: TypeAlias = Callable[[str, int, int], int]
"""How much an owner has, if it had so many rows and pages more."""


class Verdict(Enum):
    """What became of the request whose turn it was."""

    ADMITTED = auto()
    NOT_READY = auto()
    """It waits for something else than room: all others may pass it."""
    OWNER_BUSY = auto()
    """Its owner has enough to do for now."""
    NO_ROOM = auto()
    """It does not fit; a smaller one may."""
    FULL = auto()
    """It does not fit, and nothing of its owner does."""
    CLOSED = auto()
    """Nobody is admitted any more in this step."""


class Room(Protocol[R]):
    """The rows and pages of a role during one pass over the line."""

    def offer(self, request: R, now: float) -> Verdict | Failed:
        """It is this request's turn: admit it if it is ready and fits. Failed: it never will."""

    def who_gives_way(self, request: R, now: float) -> list[R] | None:
        """The requests that must end so that this one has room. Empty: it has when those are gone that have ended. None: it waits
        for its turn."""


def admit(
    requests: RequestTable[R], instance: InstanceId, make_room: Callable[[], Room[R]], now: float
) -> Iterator[tuple[R, Failed | None]]:
    """Requests that were admitted, and requests to end, each with its reason. Act on each before the next is asked for.

    make_room: begins a pass over the line. There is another one when others have given way: their room may be free at once.
    """
    looked, passed = Counter[str](), set[str]()
    goes_on = True
    while goes_on and len(requests.waiting):
        goes_on, room = False, make_room()
        most_looks = max(1, LOOKED_AT // len(requests.waiting.owners))
        for request in requests.waiting.turns(passed):
            if requests.has_place_for_adapter(request):
                verdict = room.offer(request, now)
            else:
                verdict = Verdict.CLOSED if request.has_waited_long(now) else Verdict.NOT_READY
            if verdict is Verdict.CLOSED:
                return
            if verdict is Verdict.ADMITTED:
                yield request, None
            elif isinstance(verdict, Failed):
                yield request, verdict
            elif verdict is Verdict.OWNER_BUSY:
                passed.add(request.owner)
            elif verdict is not Verdict.NOT_READY:
                victims = room.who_gives_way(request, now)
                for victim in victims or ():
                    yield victim, Failed.of(Preempted(f"{instance} needs the memory for a request of another key"))
                if victims is not None or request.has_waited_long(now):
                    goes_on = bool(victims)
                    break
                looked[request.owner] += 1
                if verdict is Verdict.FULL or looked[request.owner] >= most_looks:
                    passed.add(request.owner)


def give_up_order(requests: Iterable[R], part: Part, *, urgent_last: bool = False) -> Iterator[tuple[R, int]]:
    """The order in which requests give up their room, each with the part that is left of its owner's then: the next one is always
    of the owner that has the largest part left.

    requests: those that may end, of each owner the first to end first. part: see `Shares.of`. urgent_last: the least urgent go
    first, whatever their owners have.
    """
    left = list(requests)
    rows, pages = Counter[str](), Counter[str]()
    parts = {owner: part(owner, 0, 0) for owner in {each.owner for each in left}}
    while left:
        last = max(left, key=lambda each: (each.rank.priority if urgent_last else 0, parts[each.owner]))  # the first of several
        left.remove(last)
        owner = last.owner
        rows[owner] -= last.held_rows
        pages[owner] -= last.held_pages
        parts[owner] = part(owner, rows[owner], pages[owner])
        yield last, parts[owner]


def find_givers(
    requests: RequestTable[R], request: R, rows: int, holders: Callable[[], Iterable[R]], fits: Callable[[list[R]], bool]
) -> list[R] | None:
    """The requests of other owners that must end so that this one has room; None if nobody must give way to it.

    Each is of the owner that holds the most, and that holds no less afterwards than the newcomer's owner then does. So parts
    become equal, nobody can take the same room back, and an owner with one request keeps it.

    rows: that it takes. holders: requests that may end, the first to end first. fits: whether there is room when these have gone,
    and those that are going already.
    """
    shares = requests.shares
    mine = shares.of(request.owner, rows, request.pages - request.hit.held)
    others = (shares.rows.keys() | shares.pages.keys()) - {request.owner}
    if all(shares.of(other) <= mine for other in others):
        return None
    victims: list[R] = []
    if fits(victims):
        return victims
    for last, left in give_up_order([each for each in holders() if each.owner != request.owner], shares.of):
        if left < mine:
            return None
        victims.append(last)
        if fits(victims):
            return victims
    return None
