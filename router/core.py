"""The router's core: the fleet, the request book and the watch over the detokenizers, fed with messages and time.

Owns only what joins the three: a change in one that the others must act on. Callers reach each part directly. Opens no socket and
reads no clock, so a whole fleet runs in one process under test. Does not know HTTP.
"""

import math
from collections.abc import Sequence
from typing import assert_never

from common.config import RouterConfig
from common.deadlines import earliest
from common.ids import InstanceId, Life, text_name
from common.instance.ports import Send
from common.messages import (
    CacheChanges,
    DetokenizerHeartbeat,
    Goodbye,
    Heartbeat,
    LinkReport,
    Placed,
    Probed,
    Register,
    RouterInbox,
    Spans,
    TextBatch,
)
from common.tracing import Recorder
from router.detokenizer_watch import DetokenizerWatch
from router.fleet import Change, Fleet
from router.request_book import Observer, RequestBook
from router.traces import Traces

LATE_S = 0.1
"""A tick that comes this long after its deadline shows that the loop was busy or the process stopped."""


class RouterCore:
    """Everything that the router decides.

    router: the name of this life of it. detokenizers: their addresses. vocab_size: of its tokenizer, which instances must have
    too; None: any. unix_s: what to add to the times of the caller's clock to have UNIX time.
    """

    def __init__(
        self,
        router: InstanceId,
        detokenizers: Sequence[str],
        config: RouterConfig,
        observer: Observer,
        vocab_size: int | None = None,
        unix_s: float = 0.0,
    ) -> None:
        self._config = config
        self.unix_s = unix_s
        self.detokenizer_names = tuple(text_name(router, shard) for shard in range(len(detokenizers)))
        self.fleet = Fleet(
            router,
            detokenizers,
            config.heartbeat_s,
            config.dead_after_s,
            vocab_size,
            config.peers_per_instance,
            config.needs_caches,
        )
        recorder = Recorder(unix_s)
        self.requests = RequestBook(router, self.fleet, observer, config, self.detokenizer_names, recorder)
        self.traces = Traces(router, self.detokenizer_names, self.fleet, recorder, unix_s)
        self.detokenizers = [DetokenizerWatch(config.dead_after_s) for _ in detokenizers]
        """By number, as their names."""
        self.draining = False
        """The router takes no more requests and is about to stop."""

    def receive(self, message: RouterInbox, now: float) -> list[Send]:
        match message:
            case TextBatch():
                return [send for delta in message.deltas for send in self.requests.text(delta, now)]
            case Heartbeat():
                sends = self._apply(self.fleet.heartbeat(message, now), now)
                if message.timelines:
                    self._hear(message)
                return sends
            case Register():
                life = Life(message.instance.id, message.instance.incarnation)
                return self._apply(self.fleet.register(message, now), now) + self.traces.joined(life, now)
            case LinkReport():
                return self._apply(self.fleet.links_reported(message), now)
            case CacheChanges():
                self.fleet.cache_changed(message)
                return []
            case Goodbye():
                self._hear(message)
                return self._apply(self.fleet.goodbye(message, now), now)
            case Placed():
                return self.requests.placed(message, now)
            case Probed():
                return self.requests.probed(message, now)
            case Spans():
                self.traces.receive(message)
                return []
            case DetokenizerHeartbeat():
                return self._detokenizer_heard(message, now)
            case _:
                assert_never(message)

    def _hear(self, message: Heartbeat | Goodbye) -> None:
        """An instance tells of attempts that have left it."""
        member = self.fleet.find(Life(message.id, message.incarnation))
        if member is not None:
            self.requests.timelines.told(member.info, message.timelines)

    def detokenizer_moved(self, shard: int, address: str, now: float) -> list[Send]:
        """A new detokenizer has replaced the former one, at this address: tell the members, and open what was open there."""
        self.detokenizers[shard] = DetokenizerWatch(self._config.dead_after_s)
        self.requests.detokenizer_moved(self.detokenizer_names[shard])
        return self.fleet.detokenizer_moved(shard, address) + self.traces.detokenizer_moved(shard, now)

    def _detokenizer_heard(self, beat: DetokenizerHeartbeat, now: float) -> list[Send]:
        if beat.shard >= len(self.detokenizers):
            return []
        name = self.detokenizer_names[beat.shard]
        return self.requests.probe_all(name, now) if self.detokenizers[beat.shard].heard(beat, now) else []

    def tick(self, now: float, *, caught_up: bool = True) -> list[Send]:
        """Act on every deadline that has passed. caught_up: False while mail waits to be read: then silence says nothing.

        A tick that comes late shows that this process was held up. It must not count its own absence as the silence of others:
        what they sent meanwhile may not have reached the inbox yet. So they get time to be heard, once in each silence: a loop
        that is always late must notice the dead too.
        """
        sends: list[Send] = []
        self.traces.tick(now)
        if caught_up:
            if _is_late(self.fleet.next_deadline(), now):
                self.fleet.excuse(now)
            sends = self._apply(self.fleet.tick(now), now)
            for watch in self.detokenizers:
                if _is_late(watch.silent_at_s, now):
                    watch.excuse(now)
                watch.tick(now)
        watched = zip(self.detokenizer_names, self.detokenizers, strict=True)
        heard_s = {name: watch.heard_s if caught_up else -math.inf for name, watch in watched}
        return sends + self.requests.tick(now, heard_s)

    def take_moves(self) -> list[tuple[InstanceId, str | None]]:
        """Where the instances are now whose address may have changed since the last call; None: they are to be forgotten. A
        detokenizer's route stays as its starter gave it: no instance can take its name."""
        return [(name, address) for name, address in self.fleet.take_moves() if name not in self.detokenizer_names]

    def flush(self, now: float) -> list[Send]:
        """What was gathered to be sent together. Call it at the end of each turn."""
        self.traces.tick(now)
        return self.fleet.flush(now)

    def next_deadline(self) -> float | None:
        """When `tick` must be called; None when nothing is due."""
        silent_s = (watch.silent_at_s for watch in self.detokenizers)
        due_s = (each.next_deadline() for each in (self.fleet, self.requests, self.traces))
        return earliest(*silent_s, *due_s, self.fleet.next_flush())

    def unready(self) -> list[str]:
        """Why no request could be served now; empty when one could."""
        reasons = self.unhealthy() + self.requests.placer.unready()
        if self.draining:
            reasons.append("the router is draining: it takes no more requests")
        if len(self.requests) >= self._config.max_requests:
            reasons.append(f"all {self._config.max_requests} places for requests are taken")
        return reasons

    def unhealthy(self) -> list[str]:
        """What is wrong with the router itself."""
        return [
            f"detokenizer {shard} has not been heard of for {watch.dead_after_s:g} s"
            for shard, watch in enumerate(self.detokenizers)
            if watch.silent
        ]

    def _apply(self, change: Change, now: float) -> list[Send]:
        sends = list(change.sends)
        for member in change.lost:
            sends += self.requests.member_lost(member, now)
        if change.more_can_serve:
            sends += self.requests.retry_parked(now)
        return sends


def _is_late(due_s: float | None, now: float) -> bool:
    return due_s is not None and now - due_s > LATE_S
