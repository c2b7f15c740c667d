"""Abort, disconnect and drain meet a request in each phase from its arrival to the end of its response: it ends once, as it
should, and nothing of it stays in the router."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import pytest

from common.messages import Goodbye
from router.api import chat, intake
from router.api.bodies import LARGE_BODY_BYTES, object_in
from tests.router.calls import post, until
from tests.router.fakes import CharTokenizer, EchoFleet, Site
from tests.router.test_disconnects import RawClient

pytestmark = pytest.mark.anyio
CHOICES = 2


class Phase(Enum):
    BODY_ARRIVES = "its body has not arrived whole"
    BODY_IS_READ = "its large body is read on a thread"
    TOKENIZING = "its prompt is tokenized on a thread"
    AWAITING = "it was dispatched, and no token has come"
    GENERATING = "tokens have come"
    PARKED = "no instance can serve it any more"
    ENDED_UNREAD = "it has ended, and its client has not read the answer"

    @property
    def is_dispatched(self) -> bool:
        return self not in (Phase.BODY_ARRIVES, Phase.BODY_IS_READ, Phase.TOKENIZING)


@dataclass
class Scene:
    """A request in a phase. go: lets it go on to the next one."""

    site: Site
    client: RawClient
    phase: Phase
    go: Callable[[], object] = field(default=lambda: None)

    def count_sent(self) -> int:
        """How often the text of the choices says that it was aborted."""
        return self.client.answered.count('"finish_reason":"abort"')


STALLS = {Phase.AWAITING: 0, Phase.GENERATING: 3, Phase.PARKED: 3}


async def reach(phase: Phase, site: Site, stream: bool, held: threading.Event, is_held: threading.Event) -> Scene:
    text = "x" * LARGE_BODY_BYTES if phase is Phase.BODY_IS_READ else "hello"
    client = RawClient(site, stream=stream, n=CHOICES, user=text, is_whole=phase is not Phase.BODY_ARRIVES)
    scene = Scene(site, client, phase, held.set)
    core = site.core.requests
    match phase:
        case Phase.BODY_ARRIVES:
            scene.go = client.send_rest
            await until(lambda: len(core.clients) == 1)
        case Phase.BODY_IS_READ | Phase.TOKENIZING:
            await until(is_held.is_set)
        case Phase.AWAITING | Phase.GENERATING:
            await until(lambda: [len(record.token_ids) for record in core.records()] == [STALLS[phase]] * CHOICES)
        case Phase.PARKED:
            await until(lambda: [len(record.token_ids) for record in core.records()] == [3] * CHOICES)
            for one in (site.fleet.decode, site.fleet.prefill):
                site.gateway.deliver(site.core.receive(Goodbye(id=one.id, incarnation=one.incarnation), site.gateway.clock()))
            assert [record.attempt for record in core.records()] == [None] * CHOICES
        case Phase.ENDED_UNREAD:
            client.may_send.clear()
            scene.go = client.may_send.set
            await until(lambda: any(known.request_ids for known in core.clients) and len(core) == 0)
    assert len(core.clients) == 1
    return scene


async def abort(scene: Scene, body: dict[str, object]) -> None:
    counts = [(await post(scene.site, "/abort_request", body)).json()["aborted"] for _ in range(2)]
    known = 1 if scene.phase in (Phase.BODY_ARRIVES, Phase.BODY_IS_READ) else CHOICES
    assert counts == [0 if scene.phase is Phase.ENDED_UNREAD else known, 0], "each is ended once"
    scene.go()
    await scene.client.gone()
    assert scene.client.sent[0]["status"] == 200
    assert scene.count_sent() == (0 if scene.phase is Phase.ENDED_UNREAD else CHOICES)


async def aborted_by_its_id(scene: Scene) -> None:
    assert (await post(scene.site, "/abort_request", {"rid": "other"})).json() == {"aborted": 0}
    await abort(scene, {"rid": "mine"})


async def aborted_with_all(scene: Scene) -> None:
    await abort(scene, {"abort_all": True})


async def left_by_its_client(scene: Scene) -> None:
    scene.client.leave()
    if scene.phase in (Phase.BODY_ARRIVES, Phase.BODY_IS_READ):
        await scene.client.gone()
        assert scene.client.sent[0]["status"] == 499
    scene.go()
    await scene.client.gone()
    assert scene.phase is Phase.ENDED_UNREAD or "[DONE]" not in scene.client.answered


async def given_up_by_the_server(scene: Scene) -> None:
    scene.client.call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scene.client.call
    scene.go()


async def drained_at_once(scene: Scene) -> None:
    stop, at_once = asyncio.Event(), asyncio.Event()
    stop.set()
    at_once.set()
    await asyncio.wait_for(scene.site.gateway.drain(60.0, stop, at_once), 5)
    scene.go()
    await scene.client.gone()
    assert ("the router was stopped before the request had ended" in scene.client.answered) == (
        scene.phase is not Phase.ENDED_UNREAD
    )
    if not scene.phase.is_dispatched:
        assert (scene.client.sent[0]["status"], scene.site.fleet.cancelled()) == (503, set())


async def drained_in_time(scene: Scene) -> None:
    """The drain waits for it, also before it is dispatched."""
    stop = asyncio.Event()
    draining = asyncio.create_task(scene.site.gateway.drain(60.0, stop, asyncio.Event()))
    stop.set()
    await until(lambda: scene.site.gateway.core.requests.is_draining)
    await asyncio.sleep(0)
    assert not draining.done()
    scene.go()
    if scene.phase in (Phase.AWAITING, Phase.GENERATING, Phase.PARKED):
        assert (await post(scene.site, "/abort_request", {"rid": "mine"})).json() == {"aborted": CHOICES}
    await scene.client.gone()
    await asyncio.wait_for(draining, 5)
    assert scene.client.sent[0]["status"] == 200


EVENTS: Sequence[Callable[[Scene], object]] = (
    aborted_by_its_id,
    aborted_with_all,
    left_by_its_client,
    given_up_by_the_server,
    drained_at_once,
    drained_in_time,
)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", Phase)
async def test_whatever_meets_a_request_on_its_way_it_ends_once_and_nothing_of_it_stays(
    monkeypatch: pytest.MonkeyPatch, phase: Phase, event: Callable[[Scene], "asyncio.Future[None]"], stream: bool
) -> None:
    held, is_held = threading.Event(), threading.Event()
    if phase is Phase.TOKENIZING:
        encode = CharTokenizer.encode_chat

        def slow_encode(*arguments: object, **options: object) -> list[int]:
            is_held.set()
            held.wait(60)
            return encode(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(intake, "SHORT_CHARS", 0)
        monkeypatch.setattr(CharTokenizer, "encode_chat", slow_encode)
    if phase is Phase.BODY_IS_READ:

        def slow_read(body: bytes) -> object:
            if len(body) > LARGE_BODY_BYTES:
                is_held.set()
                held.wait(60)
            return object_in(body)

        monkeypatch.setattr(chat, "object_in", slow_read)
    try:
        async with Site(EchoFleet(stall_at=STALLS.get(phase)), max_body_bytes=2 * LARGE_BODY_BYTES) as site:
            scene = await reach(phase, site, stream, held, is_held)
            core = site.core.requests
            served = {record.attempt.key for record in core.records() if record.attempt is not None}
            await event(scene)
            if phase in (Phase.AWAITING, Phase.GENERATING):
                assert site.fleet.cancelled() == served, "everybody who served it is told"
            assert (len(core), len(core.clients), len(core.places), len(site.api.admission.places)) == (0, 0, 0, 0)
            starts = [message for message in scene.client.sent if message["type"] == "http.response.start"]
            assert len(starts) <= 1, "one response"
    finally:
        held.set()
