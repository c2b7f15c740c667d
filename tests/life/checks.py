"""What must hold when a schedule is over: every answer as it must be, and everything at home.

Owns the verdicts. Changes nothing.
"""

from collections.abc import Iterator
from itertools import pairwise

from common.ids import Variant, pack_ids
from common.messages import Failed, Finished
from common.pages.pool import PageLease, count_pages
from common.pages.radix_cache import BlockNames, PageKeys, pages_of_block
from router.request_book import FRUITLESS_ATTEMPTS
from router.timelines import RequestTimes, ResumeReason
from tests.life.client import ReceivedAnswer
from tests.life.deeds import Flush, KillDetokenizer, Slow, Stall
from tests.life.expected import Asked, Expected
from tests.life.fleet import ToyRouter
from tests.life.ranks import ToyInstance
from tests.life.trial import Trial

FEW = 10
"""Where so few may wait, some may be refused."""


def unsettled(trial: Trial) -> Iterator[str]:
    """What has not come to its end yet, or is not at home."""
    for asked in trial.asked:
        if not asked.over:
            yield f"{asked.ask.choices[0].request_id} has no ending"
    for router in trial.routers:
        yield from _not_settled(router)
    for name in sorted({life.name.id for life in trial.lives}):
        if name not in trial.instances:
            yield f"{name} is away"
    for instance in trial.instances.values():
        yield from _not_home(trial, instance)
    for router in trial.routers:
        yield from _not_informed(trial, router)
    for life in trial.lives:
        lives = trial.instances.get(life.name.id) is life
        for follower in life.followers:
            if follower.alive != lives:
                yield f"{follower.name} is gone and its instance lives" if lives else f"{follower.name} outlives its instance"


def _not_settled(router: ToyRouter) -> Iterator[str]:
    if not router.alive:
        yield f"{router.name} is away"
        return
    if len(router.core.requests):
        yield f"{router.name} has {len(router.core.requests)} requests open"
    for each in router.detokenizers:
        if each.core.open_answers or each.core.early_answers:
            yield f"{each.name} has {each.core.open_answers} answers open and {each.core.early_answers} early"
    for member in router.core.fleet.members():
        if member.assigned_tokens or member.growth_tokens:
            tokens = f"{member.assigned_tokens} + {member.growth_tokens} tokens"
            yield f"{router.name} has {tokens} assigned to {member.info.id}"


def _not_home(trial: Trial, instance: ToyInstance) -> Iterator[str]:
    name, load = instance.name.id, instance.scheduler.report().load
    stuck = stuck_pages(trial, instance)
    leased = trial.ledger_of(instance).leased_pages
    if leased != stuck:
        yield f"{name} has {leased} pages away, and {stuck} are stuck"
    if load.waiting_requests or load.pushes_in_flight:
        yield f"{name} has {load.waiting_requests} requests waiting and {load.pushes_in_flight} pushes in flight"
    if not stuck and (load.running_requests or load.reservations):
        yield f"{name} has {load.running_requests} requests running and {load.reservations} reservations"
    if load.pages_quarantined != stuck:
        yield f"{name} reports {load.pages_quarantined} pages in quarantine, and {stuck} are stuck"


def _not_informed(trial: Trial, router: ToyRouter) -> Iterator[str]:
    """What a router does not know of the prefix caches that it follows."""
    for member, told in router.core.fleet.caches.of_members.items():
        instance = trial.instances.get(member.info.id)
        if instance is None or instance.info.incarnation != member.info.incarnation:
            yield f"{router.name} follows the cache of {member.life}, which is away"
            continue
        blocks = set(instance.pool.cache.blocks(pages_of_block(member.info.page_size)))
        if told.held != blocks or told.expected:
            known = f"{len(told.held)} blocks and expects {len(told.expected)}"
            yield f"{router.name} knows of {known} in the cache of {member.info.id}, which has {len(blocks)}"


def misinformed(trial: Trial) -> Iterator[str]:
    """Prompts of which a router takes another part to be cached than that which an instance would hit."""
    for router in trial.routers:
        caches = router.core.fleet.caches
        if not caches.of_members:  # it follows none, or nobody has joined since it began
            continue
        for asked in trial.asked:
            for choice, expected in zip(asked.ask.choices, asked.expected, strict=True):
                variant = Variant(router.core.fleet.weights.target)
                tokens = pack_ids([*choice.prompt, *expected.token_ids])
                overlap = caches.match(BlockNames.of(tokens, caches.page_size, variant, choice.salt).names)
                for member in caches.of_members:
                    keys = PageKeys(caches.page_size, variant, choice.salt, tokens)
                    hit = trial.instances[member.info.id].pool.cache.match(keys, len(keys.pages))
                    cached = len(hit) * caches.page_size
                    if overlap.tokens(member) != cached - cached % caches.block_tokens:
                        known = f"{overlap.tokens(member)} tokens of {choice.request_id}"
                        yield f"{router.name} takes {known} to be in the cache of {member.info.id}, which has {cached}"


def stuck_pages(trial: Trial, instance: ToyInstance) -> int:
    """Pages of the leases that a write held which failed without proof, and that have not come home since: as long as writer
    and reader live they cannot, unless the reader has not heard the writer for longer than a write can take."""
    agents, ledger = {pool.agent for pool in instance.info.pools}, trial.ledger_of(instance)
    leases: list[PageLease] = []
    for flight in trial.fabric.unproven:
        if agents.isdisjoint((flight.write.writer, flight.write.reader)):
            continue
        for page, tenancy in (flight.read if flight.write.writer in agents else flight.written).items():
            if ledger.tenancy(page) == tenancy:
                leases += ledger.leases_of(page)
    return count_pages(leases)


def misanswered(trial: Trial) -> Iterator[str]:
    """Answers that are not as they must be."""
    for asked in trial.asked:
        if asked.given_up and not asked.unserved:
            yield f"{asked.ask.choices[0].request_id} was refused though an instance could have served it"
        if asked.client is None:
            continue
        for answer, expected in zip(asked.client.answers, asked.expected, strict=True):
            verdict = _verdict(trial, asked, answer, expected)
            if verdict is not None:
                yield f"{answer.request_id} {verdict}: tokens {answer.token_ids}, of {list(expected.token_ids)}"


def _verdict(trial: Trial, asked: Asked, answer: ReceivedAnswer, expected: Expected) -> str | None:
    """What is wrong with an answer."""
    if len(answer.endings) != 1 and not (asked.client is not None and asked.client.cut_off and not answer.endings):
        return f"ended {len(answer.endings)} times: {answer.endings}"
    tokens = tuple(answer.token_ids)
    if tokens != expected.token_ids[: len(tokens)]:
        return "has wrong tokens"
    if not expected.text.startswith(answer.text):
        return f"has the wrong text {answer.text!r}, not {expected.text!r}"
    if tuple(answer.logprobs) != expected.logprobs[: len(tokens)]:
        return f"has the log probabilities {answer.logprobs}, not {expected.logprobs}"
    if tuple(answer.prompt_logprobs) != (expected.prompt_logprobs if tokens else ()):
        return f"has the prompt's log probabilities {answer.prompt_logprobs}, not {expected.prompt_logprobs}"
    if not answer.endings:
        return None
    (ending,) = answer.endings
    if isinstance(ending, Finished) and ending.reason != "cancelled":
        if tokens != expected.token_ids or ending != expected.ending or answer.text != expected.text:
            return f"ended as {ending} with {answer.text!r}, not as {expected.ending} with {expected.text!r}"
        return None
    if isinstance(ending, Finished):
        return None if asked.left else "was cancelled by nobody"
    return _excuse(trial, asked, answer, ending)


def _excuse(trial: Trial, asked: Asked, answer: ReceivedAnswer, failed: Failed) -> str | None:
    """What is wrong with a failure; None where it may be: its time was short, there was no room, nobody could have served it, or
    something befell each of as many attempts as the router makes without a token."""
    if failed.kind == "timeout_error" and asked.ask.timeout_s is not None:
        return None
    if failed.kind == "overloaded_error" and trial.schedule.size.max_waiting < FEW:
        return None
    if failed.retryable and (asked.unserved or trial.blows[answer.request_id] >= FRUITLESS_ATTEMPTS):
        return None
    return f"failed though an instance could have served it: {failed}"


COURSES = (
    ("accepted_s", "admitted_s", "first_chunk_s", "last_chunk_s", "first_decode_s", "ended_s"),
    ("admitted_s", "asked_s", "granted_s", "first_push_s", "pushed_s"),
    ("last_chunk_s", "handed_off_s", "first_decode_s"),
    ("first_push_s", "handed_off_s"),
)
"""What follows what on an instance, as far as it happens. A request may end before its pushes and its handoff."""
EXACT_S = 1e-6
"""The sum of two times is rounded."""


def mistimed(trial: Trial) -> Iterator[str]:
    """Timelines in which something comes before what it follows from, and instances that told twice of one attempt."""
    for router in trial.routers:
        for asked in trial.asked:
            for choice in asked.ask.choices:
                request = router.core.requests.timelines._requests.get(choice.request_id)
                if request is not None:
                    yield from disordered(request)
    for (name, key), times in trial.told.items():
        if times > 1:
            yield f"{name} told {times} times of {key}"


def disordered(request: RequestTimes) -> Iterator[str]:
    """What comes too early in this timeline, process by process."""
    courses: list[list[float | None]] = [[request.received_s, request.tokenized_s]]
    for attempt in request.attempts:
        courses[0] += [attempt.dispatched_s, attempt.ended_s]
        courses.append([attempt.dispatched_s, attempt.placed_s, attempt.ended_s])
        courses += [[getattr(each.times, name) for name in course] for each in attempt.instances for course in COURSES]
    courses[0].append(request.ended_s)
    courses.append([request.tokenized_s, request.first_token_s, request.last_token_s, request.ended_s])
    for course in courses:
        happened = [at for at in course if at is not None]
        if any(later < earlier - EXACT_S for earlier, later in pairwise(happened)):
            yield f"the timeline of {request.request_id} is out of order: {course}"


def disturbed(trial: Trial) -> Iterator[str]:
    """What a router's trouble did to the requests of others, or left behind."""
    yield from trial.problems
    if trial.schedule.only_routers:
        for reason in trial.observer.resumes:
            if reason is not ResumeReason.PREEMPTED:
                yield f"nothing befell any instance, but a request was resumed: {reason}"


def needless(trial: Trial) -> Iterator[str]:
    """Attempts that were given up although the instances had everything: only routers and detokenizers failed for a while, and no
    letter between those that live was lost or overtook another. (What overtakes a Welcome goes to the former detokenizer.)"""
    chances, deeds = trial.schedule.chances, [fault.deed for fault in trial.schedule.faults]
    if chances.lost or chances.overtaking or not all(isinstance(deed, Stall | Slow | KillDetokenizer | Flush) for deed in deeds):
        return
    given_up = trial.observer.resumes.count(ResumeReason.LOST_MESSAGES)
    if given_up:
        yield f"{given_up} attempts were given up, but nothing was lost for good"


def misplaced(trial: Trial) -> Iterator[str]:
    """Bytes where they must not be."""
    yield from trial.fabric.problems
    for life in trial.lives:
        corrupt = life.scheduler.report().counters.pages_corrupt
        if corrupt:
            yield f"{life.name.id} found {corrupt} pages corrupt"
    for instance in trial.instances.values():
        pages = trial.ledger_of(instance).spoiled()
        if pages:
            yield f"somebody wrote into the free pages {pages} of {instance.name.id}"
        pages = trial.ledger_of(instance).miscached()
        if pages:
            yield f"the cached pages {pages} of {instance.name.id} do not hold the KV of their tokens"
