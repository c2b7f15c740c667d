"""Timelines: when each thing happened to a request, as far as its router and the instances that served it know.

Owns what is remembered of open requests and of the last REMEMBERED that ended, and the ids by which clients know them. Holds no
prompt, text or token. Decides nothing. Does not know HTTP.

The router's own times are of its own clock. Those of instances are UNIX times; they come with heartbeats, some time after the
instance has let go of the request, and a lost heartbeat loses them.

Less is kept of the requests of the last hour, for a trace in Mooncake's format: when each came, how long its prompt and its
answer were, and which blocks of its prompt it had in common with others. Nobody is given the names of blocks: those are hashes,
by which a guessed prompt could be known.
"""

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Annotated, Protocol, TypeAlias

import msgspec
from msgspec import Meta, Struct

from common.ids import InstanceId, RequestId, Role
from common.messages import Ending, Failed, InstanceInfo, Timeline, Times
from common.pages.radix_cache import BlockNames, pages_of_block

REMEMBERED = 4_096
"""Requests that have ended: 1.4 kB each, and 1 kB more for each further attempt."""
MOST_FOUND = 256
"""Requests of one id that are shown: clients choose ids, and may give all requests the same."""
MOST_ATTEMPTS, FAILURE_CHARS = 16, 200
"""What is remembered of a request that is resumed again and again, and of why."""
MOST_OF_AN_ATTEMPT = 8
"""Instances of which times are taken for one attempt: it has one that computes and up to four that may decode."""


class ResumeReason(StrEnum):
    """Why a request is resumed."""

    LOST_INSTANCE = "lost_instance"
    FAILED_ATTEMPT = "failed_attempt"
    PREEMPTED = "preempted"
    LOST_MESSAGES = "lost_messages"
    WEIGHTS = "weights"


SecondsOrNull: TypeAlias = Annotated[float | None, Meta(description="Null: it did not happen, or the instance has not told yet.")]
UnixTime: TypeAlias = Annotated[float, Meta(description="Seconds since 1970, by the clock of the router's host.")]


class Durations(Struct, frozen=True):
    """How long an attempt took on one instance, in seconds; None: it did not get so far there."""

    queue_s: Annotated[SecondsOrNull, Meta(description="From arrival to pages, where the prompt is computed.")] = None
    prefill_s: Annotated[SecondsOrNull, Meta(description="From pages to the first token.")] = None
    transfer_s: Annotated[
        SecondsOrNull, Meta(description="From the grant, or the first push if that is later, to the handoff.")
    ] = None
    exposed_transfer_s: Annotated[SecondsOrNull, Meta(description="From the first token to the handoff.")] = None
    decode_s: Annotated[SecondsOrNull, Meta(description="From the handoff to the end; without one, from the first token.")] = None

    @staticmethod
    def of(role: Role, times: Times) -> "Durations":
        return Durations(**{name: end - begin for name, (begin, end) in stages_of(role, times).items()})


def stages_of(role: Role, times: Times) -> dict[str, tuple[float, float]]:
    """When each part of an attempt began and ended on one instance, by the names of `Durations`. A part whose times have no order
    is left out: they come from another process."""
    stages: dict[str, tuple[float | None, float | None]] = {}
    if role == "prefill" or times.granted_s is None:  # a decode instance grants what others compute
        stages |= {"queue_s": (times.accepted_s, times.admitted_s), "prefill_s": (times.admitted_s, times.last_chunk_s)}
    if role == "prefill":
        begun = [each for each in (times.granted_s, times.first_push_s) if each is not None]
        stages["transfer_s"] = (max(begun, default=None), times.handed_off_s)
        stages["exposed_transfer_s"] = (times.last_chunk_s, times.handed_off_s)
    else:
        decode_begins = times.last_chunk_s if times.handed_off_s is None else times.handed_off_s
        stages["decode_s"] = (decode_begins, times.ended_s)
    return {
        name: (begin, end)
        for name, (begin, end) in stages.items()
        if begin is not None and end is not None and 0.0 <= end - begin < math.inf
    }


class InstanceTimeline(Struct, frozen=True):
    """The times that one instance has reported."""

    id: InstanceId
    role: Role
    times: Times
    """By the clock of the instance's host: hosts agree as well as NTP aligns them."""


class PlacementGrounds(Struct, frozen=True):
    """What the router went by when it placed an attempt."""

    tokens_in_front: int
    """Prompt tokens that its first instance had to compute before its own."""
    cached_tokens: int
    """Tokens of its prompt that were cached there as far as the router knew. 0: it does not follow."""
    predicted_s: float | None
    """From then to its first token. Null: nothing was measured yet."""
    candidates: tuple[InstanceId, ...]
    """Decode instances that could take over, best first. None: the first serves alone."""


class AttemptTimeline(Struct):
    """The times of one attempt."""

    number: int
    """From 0 on. Of many attempts the latest are remembered."""
    first: InstanceId
    """The instance that was asked."""
    dispatched_s: UnixTime
    grounds: PlacementGrounds | None = None
    """Why it was placed there."""
    first_token_s: float | None = None
    """Its first token came, which may be a later one of the answer."""
    decode: InstanceId | None = None
    """The decode instance that granted a reservation."""
    placed_s: float | None = None
    """The router heard of that."""
    ended_s: float | None = None
    """It was given up, and another attempt followed if one was left."""
    resume_reason: ResumeReason | None = None
    """Why it was given up."""
    failure: str | None = None
    """The same, for people."""
    tokens: int = 0
    """Tokens of the answer that it brought, once it is over."""
    instances: list[InstanceTimeline] = []
    """What instances told of it, prefill first. Each tells within a heartbeat after it has let go of it."""

    def facts(self) -> dict[str, int | str]:
        """What traces say of it."""
        return {"attempt": self.number, "first": self.first, "decode": self.decode or "", "tokens": self.tokens}


class ChoiceTimes(Struct, kw_only=True):
    """What is told of one choice of a client's request."""

    index: int
    """Its number in the answer."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt whose KV was there already."""
    tokens: int = 0
    """Tokens of the answer so far."""
    drafts: tuple[int, int] = (0, 0)
    """Tokens that were proposed for the answer (speculative decoding), and those of them that are in it."""
    ending: str | None = None
    """How it ended, as in `tandem_requests_ended`. Null: it is open."""
    received_s: UnixTime
    """When its HTTP request arrived."""
    tokenized_s: UnixTime
    """When it was dispatched."""
    first_token_s: UnixTime | None = None
    last_token_s: UnixTime | None = None
    ended_s: UnixTime | None = None


class RequestTimes(ChoiceTimes, kw_only=True, eq=False):
    """One choice of a client's request, by the router's own clock."""

    request_id: RequestId
    owner: str
    attempts: list[AttemptTimeline] = []
    predicted_first_s: float | None = None
    """Seconds from its arrival to its first token, as predicted when it was last placed before that; None: no prediction."""
    names: list[str] = []
    """Ids by which its client knows it."""

    def facts(self) -> dict[str, int | str]:
        """What traces say of it once it has ended."""
        sizes = {"prompt_tokens": self.prompt_tokens, "tokens": self.tokens}
        return {"attempts": self.attempts[-1].number + 1 if self.attempts else 0, "ended": self.ending or "", **sizes}

    def dispatched(self, number: int, first: InstanceId, grounds: PlacementGrounds, now: float) -> None:
        """The attempt of this number begins. Of many attempts the latest are remembered."""
        if self.first_token_s is None:
            predicted_s = grounds.predicted_s
            self.predicted_first_s = None if predicted_s is None else now - self.received_s + predicted_s
        self.attempts.append(AttemptTimeline(number, first, now, grounds))
        if len(self.attempts) > MOST_ATTEMPTS:
            del self.attempts[0]

    def resumed(self, reason: ResumeReason, failed: Failed, now: float, tokens: int = 0) -> None:
        """Its latest attempt is over, and has brought so many tokens."""
        attempt = self.attempts[-1]
        attempt.tokens = tokens
        attempt.ended_s, attempt.resume_reason, attempt.failure = now, reason, failed.message[:FAILURE_CHARS]

    def ended(self, ending: Ending, now: float) -> None:
        self.ended_s = now
        self.ending = ending.kind if isinstance(ending, Failed) else ending.reason


class Observer(Protocol):
    """Who counts and measures."""

    def first_token(self, seconds: float, predicted_s: float | None) -> None:
        """Both times are from the arrival of the request. predicted_s: None if nothing was predicted."""

    def next_tokens(self, seconds: float, tokens: int) -> None: ...

    def resumed(self, reason: ResumeReason) -> None: ...

    def resume_gap(self, seconds: float) -> None:
        """seconds: from a resumed request's last token (from the resume, if it had none) to its next one."""

    def ended(self, ending: Ending, times: RequestTimes, attempts: int) -> None: ...

    def phases(self, durations: Durations) -> None:
        """An instance has told how long an attempt took there."""


class Timelines:
    """The timelines of one router's requests."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._requests: dict[RequestId, RequestTimes] = {}
        self._ended: deque[RequestId] = deque()
        self._named: dict[str, list[RequestTimes]] = {}
        self.stale = 0
        """Reports about attempts that are not known, and reports that came twice."""

    def begin(self, request: RequestTimes) -> None:
        """The request was dispatched."""
        self._requests[request.request_id] = request

    def name(self, named: Mapping[str, Iterable[RequestId]]) -> None:
        """The ids by which the client of these requests knows them."""
        for name, request_ids in named.items():
            for request_id in request_ids:
                request = self._requests.get(request_id)
                if request is not None:
                    request.names.append(name)
                    self._named.setdefault(name, []).append(request)

    def end(self, request: RequestTimes) -> None:
        """The request has ended: it is remembered until REMEMBERED others have ended."""
        self._ended.append(request.request_id)
        if len(self._ended) > REMEMBERED:
            forgotten = self._requests.pop(self._ended.popleft())
            for name in forgotten.names:
                self._named[name].remove(forgotten)
                if not self._named[name]:
                    del self._named[name]

    def ended_since(self, since_s: float) -> Iterator[RequestTimes]:
        """Those that have ended after then, the latest first."""
        for request_id in reversed(self._ended):
            request = self._requests[request_id]
            if request.ended_s is None or request.ended_s <= since_s:
                return
            yield request

    def find(self, name: str, owner: str | None = None) -> list[RequestTimes]:
        """The latest requests that clients know by this id, in the order of their dispatch. owner: only those of this API key."""
        return [each for each in self._named.get(name, ()) if owner in (None, each.owner)][-MOST_FOUND:]

    def receive(self, by: InstanceInfo, timelines: Iterable[Timeline]) -> None:
        """An instance reports attempts that have left it."""
        for timeline in timelines:
            request = self._requests.get(timeline.key.request_id)
            attempts = () if request is None else request.attempts
            attempt = next((each for each in attempts if each.number == timeline.key.attempt), None)
            told = [] if attempt is None else [each.id for each in attempt.instances]
            if attempt is None or by.id in told or len(told) >= MOST_OF_AN_ATTEMPT:
                self.stale += 1
                continue
            attempt.instances.append(InstanceTimeline(by.id, by.role, timeline.times))
            self._observer.phases(Durations.of(by.role, timeline.times))


HOUR_S = 3600.0
MOST_REQUESTS, MOST_NAMES = 50_000, 500_000
"""What is kept takes 15 MB at most: the oldest requests go first."""
BLOCK_TOKENS = 512
"""Tokens that one of a trace's hash_ids stands for."""


@dataclass(frozen=True, slots=True)
class PastRequest:
    """A request that has ended."""

    received_s: float
    prompt_tokens: int
    answer_tokens: int
    names: "array[int]"
    """Names of the whole blocks of its prompt, each with all that is before it."""


class LoadLine(msgspec.Struct, frozen=True):
    """A line of a trace. timestamp: milliseconds. hash_ids: the blocks of the prompt; the last may be cut short."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class PastLoad:
    """Those of one router."""

    def __init__(self) -> None:
        self._requests: deque[PastRequest] = deque()
        self._names = 0

    def add(self, received_s: float, prompt_tokens: int, answer_tokens: int, blocks: BlockNames | None, now: float) -> None:
        """A request has ended. blocks: None: they were not named."""
        names = array("Q", () if blocks is None else _names_of(blocks))
        self._requests.append(PastRequest(received_s, prompt_tokens, max(1, answer_tokens), names))
        self._names += len(names)
        self._forget(now)

    def requests(self, now: float) -> list[PastRequest]:
        """In the order of their ends."""
        self._forget(now)
        return list(self._requests)

    def _forget(self, now: float) -> None:
        requests = self._requests
        while requests and (len(requests) > MOST_REQUESTS or self._names > MOST_NAMES or requests[0].received_s < now - HOUR_S):
            self._names -= len(requests.popleft().names)


def lines_of(requests: Sequence[PastRequest]) -> Iterator[LoadLine]:
    """In the order of their arrival, the first at 0."""
    numbers: dict[int, int] = {}
    fresh = count()
    coming = sorted(requests, key=lambda request: request.received_s)
    for each in coming:
        at_ms = round(1000 * (each.received_s - coming[0].received_s))
        yield LoadLine(at_ms, each.prompt_tokens, each.answer_tokens, tuple(_ids(each, numbers, fresh)))


def _names_of(blocks: BlockNames) -> Sequence[int]:
    """The name of each whole block of a trace: that of the last of the blocks that it consists of."""
    each = BLOCK_TOKENS // (blocks.page_size * pages_of_block(blocks.page_size))
    return blocks.names[each - 1 :: each] if each else ()


def _ids(request: PastRequest, numbers: dict[int, int], fresh: Iterator[int]) -> Iterator[int]:
    """What is in no whole block is nobody else's."""
    for name in request.names:
        if name not in numbers:
            numbers[name] = next(fresh)
        yield numbers[name]
    for _ in range(-(-request.prompt_tokens // BLOCK_TOKENS) - len(request.names)):
        yield next(fresh)
