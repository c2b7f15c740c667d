"""The watch over silent attempts: messages may be lost, so the router asks the members of an attempt that brings no token.

Owns when an attempt's silence is looked at. Says which attempts have lost messages; the request book acts on it. Knows no clients
and no placements.

    a token, or the start ──PROBE_S──► Probe to its members ──Probed──► two rounds in a row say so: messages were lost
"""

from collections.abc import Callable, Container, Iterable
from typing import TypeAlias

from common.deadlines import DeadlineWheel
from common.ids import InstanceId, Key
from common.instance.ports import Send
from common.messages import Probe, Probed
from router.attempts import Attempt
from router.members import Member
from router.requests import Record

PROBE_S = 2.0
"""After this long without a token the router asks an attempt's members about it, and again after as long."""

Served: TypeAlias = tuple[Record, Attempt]
"""An open request and its present attempt."""


class Retelling:
    """Of every attempt of this router. find: the request whose present attempt has this key, if there is one."""

    def __init__(self, find: Callable[[Key], Served | None]) -> None:
        self._find = find
        self._silences: DeadlineWheel[Key] = DeadlineWheel()
        """When to look at an attempt. A token does not move this; an alarm that rings too early is set again."""
        self.next_deadline = self._silences.next_deadline
        self.stale_standings = 0
        """Dropped answers to probes: about attempts that are not open, or from instances that do not serve them."""

    def watch(self, attempt: Attempt, now: float) -> None:
        """The attempt begins."""
        self._silences.set(attempt.key, now + PROBE_S)

    def drop(self, attempt: Attempt) -> None:
        """The attempt is over. Idempotent."""
        self._silences.clear(attempt.key)

    def ask(self, attempts: Iterable[Attempt], now: float) -> list[Send]:
        """Ask every member that serves one of these attempts, in one message each."""
        asked: dict[Member, list[Key]] = {}
        for attempt in attempts:
            attempt.start_probe_round()
            self._silences.set(attempt.key, now + PROBE_S)
            for member in attempt.needed:
                asked.setdefault(member, []).append(attempt.key)
        return [Send(member.info.id, Probe(keys=tuple(keys))) for member, keys in asked.items()]

    def probed(self, message: Probed) -> list[Served]:
        """Take in what a member knows about some attempts. Returns those that have lost messages."""
        lost: dict[Key, Served] = {}
        for standing in message.standings:
            served = self._find(standing.key)
            member = None if served is None else served[1].find_needed(message.id, message.incarnation)
            if served is None or member is None:
                self.stale_standings += 1
                continue
            _, attempt = served
            attempt.note_answer(member, standing.next_token)
            if attempt.lost_messages:
                lost[standing.key] = served
        return list(lost.values())

    def tick(self, now: float, mute: Container[InstanceId]) -> list[Send]:
        """Ask about the attempts that are silent. mute: detokenizers of which the absence of tokens says nothing."""
        served = (self._find(key) for key in self._silences.expired(now))
        silent = [one[1] for one in served if one is not None and self._is_silent(one[1], now, mute)]
        return self.ask(silent, now)

    def _is_silent(self, attempt: Attempt, now: float, mute: Container[InstanceId]) -> bool:
        if attempt.detokenizer in mute:
            attempt.restart_silence(now)
        due_s = attempt.silent_since_s + PROBE_S
        if due_s > now:
            self._silences.set(attempt.key, due_s)
        return due_s <= now
