"""What the router does when tokens do not come: it asks the members of an attempt, and has them told again what may be lost.

Owns when an attempt's silence is looked at, and which answers wait to be opened again. Says which attempts have lost messages for
good; the request book acts on it. Knows no clients and no placements.

    a token, or the start ──PROBE_S──► Probe to its members ──Probed──► it seems that messages were lost ─┐
    a gap in the text ────────────────────────────────────────────────────────────────────────────────────┤
    its detokenizer was started again ────────────────────────────────────────────────────────────────────┴─► it waits in line
    in line ──► ExpectAnswer to the detokenizer, Repeat to the members ──PROBE_S──► Probe ──► they still say so ──► they were lost

Answers to probes follow the tokens through the detokenizer. So nothing is judged while tokens are on their way, however long they
take, and nothing while the detokenizer is gone.

Opening an answer again costs a detokenizer more, the longer the answer is. So the line moves about as fast as a detokenizer can
follow.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from common.deadlines import DeadlineWheel, earliest
from common.ids import ID_BYTES, AttemptId, InstanceId, pack_ids
from common.instance.ports import Send
from common.messages import ExpectAnswer, Probe, Probed, Repeat
from router.attempts import Attempt, Loss
from router.members import Member

PROBE_S = 2.0
"""After this long without a token the router asks an attempt's members about it, and again after as long."""
FRESH_S = 1.5
"""A detokenizer sends a heartbeat every second. When none has come for this long it may be gone, and then nobody is asked, for no
answer would come."""
CONTEXT_TOKENS = 8
"""How many of the prompt's last tokens the detokenizer gets, to decode the answer's first characters in their context."""
SPARE_LIFE_S = 60.0
"""The detokenizer forgets an answer this long after its deadline, in case it never hears of its end."""
TURN_TOKENS = 8_192
"""How many tokens so far the answers may have that are opened again in one turn; one answer may have more."""
ANSWER_TOKENS = 64
"""What an answer costs besides its tokens."""
TOKENS_PER_S = 400_000.0
"""A detokenizer takes in more, so it has time left for the tokens that come."""


class Retelling:
    """The silences of every attempt of this router. find: the present attempt of a request, if it has this id."""

    def __init__(self, find: Callable[[AttemptId], Attempt | None]) -> None:
        self._find = find
        self._silences: DeadlineWheel[AttemptId] = DeadlineWheel()
        """When to look at an attempt. A token does not move this; an alarm that rings too early is set again."""
        self._line: dict[AttemptId, None] = {}
        """The answers to open again, in order. They are not looked at meanwhile."""
        self._turn_s = 0.0
        """When the next of them may be opened."""
        self._round = 0
        """Counts the times that members were asked."""
        self.stale_standings = 0
        """Dropped answers to probes: about attempts that are not open, or from instances that do not serve them."""

    def next_deadline(self) -> float | None:
        """When `tick` must be called; None when nothing is due."""
        return earliest(self._silences.next_deadline(), self._turn_s if self._line else None)

    def expect(self, attempt: Attempt, now: float, *, again: bool = False) -> Send:
        """Watch the attempt from now on, and tell the detokenizer to make text of its tokens from the next one on."""
        self._silences.set(attempt.key, now + PROBE_S)
        record, spec = attempt.record, attempt.record.spec
        message = ExpectAnswer(
            key=attempt.key,
            stop=spec.stop,
            first=len(record.token_ids),
            context=spec.prompt[-CONTEXT_TOKENS * ID_BYTES :] + pack_ids(record.token_ids),
            text="".join(record.texts),
            skip_special_tokens=spec.skip_special_tokens,
            shown=spec.shown,
            parts=spec.parts,
            stop_token_ids=spec.stop_token_ids,
            include_stop=spec.include_stop,
            min_tokens=spec.sampling.min_tokens,
            logprobs=spec.sampling.logprobs is not None,
            again=again,
            life_s=record.deadline_s - now + SPARE_LIFE_S,
        )
        return Send(attempt.detokenizer, message)

    def drop(self, attempt: Attempt) -> None:
        """The attempt is over. Idempotent."""
        self._silences.clear(attempt.key)
        self._line.pop(attempt.key, None)

    # --- probes ----------------------------------------------------------------------------------------------------------

    def ask(self, attempts: Iterable[Attempt], now: float) -> list[Send]:
        """Ask every member that serves one of these attempts, in one message each."""
        asked: dict[Member, list[AttemptId]] = {}
        self._round += 1
        for attempt in attempts:
            self._silences.set(attempt.key, now + PROBE_S)
            for member in attempt.needed:
                asked.setdefault(member, []).append(attempt.key)
        return [Send(member.info.id, Probe(keys=tuple(keys), round=self._round)) for member, keys in asked.items()]

    def probed(self, message: Probed) -> list[Attempt]:
        """Take in what a member knows about some attempts. Returns those that have lost messages for good."""
        lost: list[Attempt] = []
        by = (message.id, message.incarnation)
        for standing in message.standings:
            attempt = self._find(standing.key)
            member = None if attempt is None else next((member for member in attempt.needed if member.life == by), None)
            if attempt is None or member is None:
                self.stale_standings += 1
                continue
            if attempt.key in self._line:
                continue  # its tokens are about to be asked for again
            if standing.waits:
                self.tell_again([attempt])  # nothing of it is lost but its ExpectAnswer, which is sent again
                continue
            match attempt.note_answer(member, standing.next_token, message.round):
                case Loss.PROVEN:
                    lost.append(attempt)
                case Loss.SEEMS:
                    self.tell_again([attempt])
                case Loss.NONE:
                    pass
        return lost

    def tick(self, now: float, heard_s: Mapping[InstanceId, float]) -> list[Send]:
        """Ask about the attempts that are silent, and open answers again whose turn it is. heard_s: when each detokenizer was
        last heard; minus infinite while what does not come from it says nothing."""
        sends = self._open_again(now) if self._line and now >= self._turn_s else []
        attempts = map(self._find, self._silences.expired(now))
        silent = [attempt for attempt in attempts if attempt is not None and self._is_silent(attempt, now, heard_s)]
        return sends + self.ask(silent, now)

    def _is_silent(self, attempt: Attempt, now: float, heard_s: Mapping[InstanceId, float]) -> bool:
        """Whether it is silent while its detokenizer is heard; otherwise it is looked at later."""
        heard = heard_s[attempt.detokenizer]
        if heard == -math.inf:
            attempt.restart_silence(now)
        due_s = attempt.silent_since_s + PROBE_S
        if due_s <= now and heard < now - FRESH_S:
            due_s = now + FRESH_S
        if due_s > now:
            self._silences.set(attempt.key, due_s)
        return due_s <= now

    # --- telling again ---------------------------------------------------------------------------------------------------

    def tell_again(self, attempts: Iterable[Attempt]) -> None:
        """What these brought may be lost on its way: open their answers again, those first whose clients wait longest, and have
        the tokens told again. An attempt that stands in line keeps its place."""
        for attempt in sorted(attempts, key=lambda attempt: attempt.silent_since_s):
            self._silences.clear(attempt.key)
            self._line.setdefault(attempt.key)

    def gap(self, attempt: Attempt) -> None:
        """Text came that does not follow what came before."""
        attempt.seemed_lost = True
        if not attempt.is_repeated:
            self.tell_again([attempt])

    def _open_again(self, now: float) -> list[Send]:
        """Those whose turn it is. The next turn is when the detokenizer may have followed."""
        sends: list[Send] = []
        repeats: dict[Member, list[tuple[AttemptId, int]]] = {}
        taken = 0
        while self._line and taken < TURN_TOKENS:
            key = next(iter(self._line))
            del self._line[key]
            attempt = self._find(key)
            if attempt is None:
                continue
            sends.append(self.expect(attempt, now, again=True))
            taken += ANSWER_TOKENS + attempt.next_token
            attempt.start_again(now, self._round)
            for member in attempt.possible_senders:
                repeats.setdefault(member, []).append((key, attempt.next_token))
        self._turn_s = now + taken / TOKENS_PER_S
        return sends + [Send(member.info.id, Repeat(tokens=tuple(tokens))) for member, tokens in repeats.items()]
