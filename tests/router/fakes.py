"""Doubles for router tests: a tokenizer of characters, and a fleet behind a mail port that answers in the same loop.

The fleet echoes: the answer to a prompt is the prompt again, one character for each token, from its beginning. Its embedding is 3
and the prompt's length.
"""

import asyncio
import dataclasses
import inspect
import re
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from types import CodeType
from typing import Any, Self, cast
from unittest import mock

import httpx
import numpy as np
from fastapi.routing import APIRoute, request_response
from msgspec.structs import replace

from common.access import OPEN, Access
from common.config import RouterConfig
from common.errors import BadRequest
from common.ids import ROUTER, AttemptId, InstanceId, Life, unpack_ids
from common.instance.ports import Send
from common.messages import (
    AnyMessage,
    Cancel,
    Counters,
    Ending,
    ExpectAnswer,
    Failed,
    Finished,
    ForgetAnswer,
    Generate,
    Heartbeat,
    InstanceInfo,
    LinkInfo,
    LinkReport,
    Load,
    Peers,
    Placed,
    Register,
    RouterInbox,
    TellLinks,
    TextBatch,
    TextDelta,
    TokenLogprob,
)
from common.messages.variants import DoTask, LeaveGroup, TaskDone
from common.text.embedding import EmbeddingMode
from common.text.tokenizer_manager import ChatOptions, TokenizerManager
from router.api.app import Api, build_app
from router.api.description import Handler, StrictRoute
from router.api.intake import Intake
from router.api.server import MAX_BODY_BYTES, WaitingConnections, listen, serve_app
from router.core import Gateway, RouterCore
from router.fleet import Members
from router.members import Change
from router.metrics import RouterMetrics
from router.timelines import Durations, RequestTimes, ResumeReason
from tests.builders import LAYOUT, engine, instance
from tests.common.mailboxes import FakeMail

MODEL = "echo"
CONTEXT = engine().model.context_tokens
SPECIAL = "\x01"
"""A special token."""


class Unobserved:
    """Implements `router.timelines.Observer`; keeps what it was told."""

    def __init__(self) -> None:
        self.first_tokens: list[float] = []
        self.gaps: list[tuple[float, int]] = []
        self.predictions: list[tuple[float, float]] = []
        self.resumes: list[ResumeReason] = []
        self.resume_gaps: list[float] = []
        self.endings: list[Ending] = []
        self.attempts: list[int] = []
        self.spendings: list[tuple[str, int, int]] = []
        self.durations: list[Durations] = []

    def first_token(self, seconds: float, predicted_s: float | None) -> None:
        self.first_tokens.append(seconds)
        if predicted_s is not None:
            self.predictions.append((predicted_s, seconds))

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self.gaps.append((seconds, tokens))

    def resumed(self, reason: ResumeReason) -> None:
        self.resumes.append(reason)

    def resume_gap(self, seconds: float) -> None:
        self.resume_gaps.append(seconds)

    def ended(self, ending: Ending, times: RequestTimes, attempts: int) -> None:
        self.endings.append(ending)
        self.attempts.append(attempts)
        if times.owner:
            self.spendings.append((times.owner, times.prompt_tokens, times.tokens))

    def phases(self, durations: Durations) -> None:
        self.durations.append(durations)


class CharText:
    """Implements `router.api.logprobs.TokenTexts`."""

    def text(self, token_id: int) -> str:
        return chr(token_id)

    def bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    first_bytes = bytes

    def is_special(self, token_id: int) -> bool:
        return chr(token_id) == SPECIAL


class CharTokenizer:
    """Does what the router needs of a `TokenizerManager`: a token is a character's code. chat_template: what it seems to be,
    with Mistral's marks as special tokens; the prompt is always the contents of the messages."""

    vocab_size = engine().model.vocab_size
    token_text = CharText()

    def __init__(self, chat_template: str = "", context_tokens: int = CONTEXT) -> None:
        self.context_tokens = context_tokens
        self.chat_template = chat_template
        self.reads_tools = "tools" in chat_template
        self.marks = {"eos_token": "</s>"}
        self.special_tokens = {mark: id for id, mark in enumerate(re.findall(r"\[[A-Z_]+\]|</s>", chat_template))}

    def reads(self, name: str) -> bool:
        return re.search(rf"\b{name}\b", self.chat_template) is not None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = "".join(map(chr, ids))
        return text.replace(SPECIAL, "") if skip_special_tokens else text

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        return [ord(char) for char in text]

    def spellings(self, word: str, field: str) -> Sequence[tuple[int, ...]]:
        return [tuple(self.encode(word, field=field))] if word else []

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return list(map(chr, ids))

    def encode_chat(self, messages: Sequence[Mapping[str, object]], options: ChatOptions, field: str = "messages") -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise BadRequest("the template wants the user to speak last", field="messages")
        return self.encode("".join(str(message["content"]) for message in messages))


def link(peer: InstanceInfo) -> LinkInfo:
    return LinkInfo(peer=peer.id, incarnation=peer.incarnation, state="ready")


def beat(
    of: InstanceInfo, load: Load | None = None, draining: bool = False, peers_version: int = 0, links_version: int = 0
) -> Heartbeat:
    return Heartbeat(
        id=of.id,
        incarnation=of.incarnation,
        load=load or Load(),
        counters=Counters(),
        peers_version=peers_version,
        links_version=links_version,
        draining=draining,
    )


def says(
    fleet: Members, of: InstanceInfo, *peers: InstanceInfo, load: Load | None = None, draining: bool = False
) -> list[RouterInbox]:
    """What a member sends that has taken in all that it was told: a prefill instance has ready links to these peers and to no
    others, a decode instance knows all its peers, or none if there are none here."""
    told = fleet.peering._states.get(of.id)
    if told is None:
        return [beat(of, load, draining)]
    if of.role == "decode":
        return [beat(of, load, draining, told.version if peers else 0)]
    version = told.links_version + 1
    report = LinkReport(id=of.id, incarnation=of.incarnation, version=version, links=tuple(link(peer) for peer in peers))
    return [report, beat(of, load, draining, told.version, version)]


def hear(
    fleet: Members, of: InstanceInfo, *peers: InstanceInfo, now: float, load: Load | None = None, draining: bool = False
) -> Change:
    """What follows from what a member says: see `says`."""
    flush(fleet, now)
    all_changes = Change()
    for message in says(fleet, of, *peers, load=load, draining=draining):
        if isinstance(message, LinkReport):
            all_changes.take(fleet.told(message, now))
        else:
            all_changes.take(fleet.heartbeat(cast(Heartbeat, message), now))
    return all_changes


def flush(fleet: Members, now: float) -> list[Send]:
    """What members are told of each other now, however long ago they were told something."""
    fleet.peering._gather_until_s = now
    return fleet.peering.flush(now)


def _holding(member: InstanceInfo, context_tokens: int) -> InstanceInfo:
    """The member, with a model of this context, and room for it."""
    pool = replace(member.pools[0], total_pages=max(64, context_tokens // LAYOUT.page_size))
    return replace(member, model=replace(member.model, context_tokens=context_tokens), pools=(pool,))


def likely(token_id: int, top: int, chosen: Sequence[int] = ()) -> TokenLogprob:
    """What the fleet tells of a token: it is the likeliest one, and those that follow it in the vocabulary come next. chosen:
    tokens in their place."""
    if chosen:
        return TokenLogprob(token_id, -0.25, 1, tuple((one, -abs(one - token_id) / 10) for one in chosen))
    return TokenLogprob(token_id, -0.25, 1, tuple((token_id + rank, -0.25 - rank) for rank in range(top)))


class EchoFleet(FakeMail[RouterInbox]):
    """A prefill and a decode instance and a detokenizer, which answer when the loop turns.

    fail_at: number of the token in whose place a failure comes, in the first `failing` attempts (None: in all).
    stall_at: number of the token before which the fleet falls silent. context_tokens: of its model.
    stop_at: number of the token that ends the answer as a stop token does, without a text.
    """

    def __init__(
        self,
        fail_at: int | None = None,
        stall_at: int | None = None,
        failed: Failed | None = None,
        joins: bool = True,
        failing: int | None = None,
        context_tokens: int = CONTEXT,
        stop_at: int | None = None,
    ) -> None:
        super().__init__()
        self._stop_at = stop_at
        self.joins = joins
        self.context_tokens = context_tokens
        self.prefill, self.decode = (
            _holding(instance("p0", "prefill"), context_tokens),
            _holding(instance("d0", "decode"), context_tokens),
        )
        self.gateway: Gateway | None = None
        self._fail_at, self._stall_at, self._failing = fail_at, stall_at, failing
        self._failed = failed or Failed(message="the step failed")
        self._stops: dict[AttemptId, tuple[str, ...]] = {}
        self._arrived: deque[RouterInbox] = deque()
        self._turning = False
        self.tells: tuple[LinkInfo, ...] = ()
        """What the prefill instance answers when it is asked for its links; nothing: it does not answer."""
        self.cached_tokens = 0
        """How many tokens of each prompt the fleet had cached."""
        self.drafts = 0, 0
        """What it says of each token: see `TokenDelta`."""

    def join(self) -> None:
        for one in (self.prefill, self.decode):
            self.say(Register(instance=one))

    def say(self, message: RouterInbox) -> None:
        """Send it to the router. Only one message goes in each turn of the loop, so that clients see them one by one."""
        self._arrived.append(message)
        if len(self._arrived) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def receive(self, most: int = 1) -> list[tuple[InstanceId, RouterInbox]]:
        turning, self._turning = self._turning, False
        return [(InstanceId("someone"), self._arrived[0])] if turning else []

    def _turn(self) -> None:
        assert self.gateway is not None
        self._turning = True
        self.gateway.pump()
        self._arrived.popleft()
        if self._arrived:
            asyncio.get_running_loop().call_soon(self._turn)

    def send(self, to: InstanceId, message: AnyMessage) -> None:
        super().send(to, message)
        if isinstance(message, Peers):
            self._meet(to, message)
        if isinstance(message, TellLinks) and self.tells:
            of = self.prefill
            self.say(LinkReport(id=of.id, incarnation=of.incarnation, version=1, links=self.tells))
        if isinstance(message, DoTask):
            failed = None if isinstance(message.task, LeaveGroup) else Failed.of(BadRequest("the fake does no tasks"))
            self.say(TaskDone(id=to, incarnation=message.incarnation, number=message.number, failed=failed))
        if isinstance(message, ExpectAnswer):
            self._stops[message.key] = message.stop
        if isinstance(message, Generate):
            if message.decodes:
                by, decode = self.prefill, Life(self.decode.id, self.decode.incarnation)
                self.say(Placed(id=by.id, incarnation=by.incarnation, key=message.key, decode=decode))
            for delta in self._answer(message):
                self.say(TextBatch(deltas=(delta,)))

    def _meet(self, who: InstanceId, message: Peers) -> None:
        """The instance takes in its peers, and the prefill instance links to them at once."""
        if who == self.prefill.id:
            links = tuple(link(peer) for peer in message.joined)
            of = self.prefill
            self.say(LinkReport(id=of.id, incarnation=of.incarnation, version=1, links=links))
            self.say(beat(of, peers_version=message.version, links_version=1))
        else:
            self.say(beat(self.decode, peers_version=message.version))

    def cancelled(self) -> set[AttemptId]:
        """Requests that were cancelled at the instances and closed at the detokenizer."""
        cancels = {message.key for _, message in self.sent if isinstance(message, Cancel)}
        return cancels & {message.key for _, message in self.sent if isinstance(message, ForgetAnswer)}

    def _answer(self, message: Generate) -> list[TextDelta]:
        key, ids = message.key, unpack_ids(message.prompt).tolist()
        prompt = ids[: len(ids) - message.first]
        deltas: list[TextDelta] = []
        text = "".join(map(chr, ids[len(prompt) :]))
        if message.sampling.pooling is not None:
            embedding = np.array([3.0, len(prompt)], dtype="<f4").tobytes()
            return [] if self._stall_at == 0 else [TextDelta(key, 0, (), "", Finished("stop", embedding=embedding))]
        end = message.first + message.sampling.max_new_tokens
        for number in range(message.first, end):
            if number == self._stall_at:
                return deltas
            if number == self._fail_at and (self._failing is None or key.attempt < self._failing):
                return [*deltas, TextDelta(key, number, (), "", self._failed)]
            token = prompt[number % len(prompt)]
            if number == self._stop_at:
                return [*deltas, TextDelta(key, number, (token,), "", Finished(reason="stop", matched=token))]
            text += chr(token)
            stop = next((stop for stop in self._stops[key] if text.endswith(stop)), None)
            last = number == end - 1
            ending = Finished(reason="stop", matched=stop) if stop else Finished(reason="length") if last else None
            top, prompt_top = message.sampling.logprobs, message.sampling.prompt_logprobs
            logprobs = () if top is None else (likely(token, top, message.sampling.logprob_ids),)
            of_prompt = () if prompt_top is None or number > 0 else tuple(likely(one, prompt_top) for one in prompt[1:])
            cached = 0 if number else self.cached_tokens
            beside = logprobs, of_prompt, cached, self.drafts
            deltas.append(TextDelta(key, number, (token,), "" if stop else chr(token), ending, *beside))
            if ending is not None:
                break
        return deltas


def intake_of(core: RouterCore, tokenizer: CharTokenizer, config: RouterConfig) -> Intake:
    return Intake(core, cast(TokenizerManager, tokenizer), MODEL, config)


_routes: dict[tuple[str, str, CodeType], APIRoute] = {}


class ReadOnce(StrictRoute):
    """A route of which FastAPI reads the signature once for all sites: that took most of the time of most tests here."""

    def __init__(self, path: str, endpoint: Handler, **options: Any) -> None:
        key = path, str(options["methods"]), inspect.unwrap(endpoint).__code__
        if key not in _routes:
            super().__init__(path, endpoint, **options)
            _routes[key] = self
            return
        vars(self).update(vars(_routes[key]), endpoint=endpoint)

        async def first(*asked: Any) -> None:
            self.dependant = dataclasses.replace(self.dependant, call=endpoint)
            self.app = request_response(self.get_route_handler())
            await self.app(*asked)

        self.app = first


class Site:
    """A router without sockets: app, gateway and fleet in the running loop."""

    def __init__(
        self,
        fleet: EchoFleet | None = None,
        config: RouterConfig | None = None,
        max_body_bytes: int = 100_000,
        chat_template: str = "",
        access: Access = OPEN,
        embedding: EmbeddingMode | None = None,
        life: InstanceId = ROUTER,
    ) -> None:
        self.access = access
        self.fleet = fleet = fleet or EchoFleet()
        config = config or RouterConfig(dead_after_s=60.0)  # its instances send no heartbeats: a slow test must not lose them
        self.metrics = RouterMetrics()
        self.core = RouterCore(life, ["tcp://detokenizer:1"], config, self.metrics)
        self.gateway = Gateway(self.core, fleet, time.monotonic)
        self.intake = intake_of(self.core, CharTokenizer(chat_template, fleet.context_tokens), config)
        config = dataclasses.replace(config, max_body=str(max_body_bytes))
        self.api = api = Api(self.gateway, self.intake, self.metrics, MODEL, config, embedding)
        with mock.patch("router.api.description.StrictRoute", ReadOnce):
            self.app = build_app(api, self.metrics, access, (config.host,))
        fleet.gateway = self.gateway
        self._working = api.working()

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app, raise_app_exceptions=False), base_url="http://127.0.0.1"
        )

    async def __aenter__(self) -> Self:
        if self.fleet.joins:
            self.fleet.join()
            while self.core.unready() or self.core.degraded():
                self.core.fleet.peering._gather_until_s = 0.0  # a router waits for more that join at the same time
                self.gateway.deliver(())
                await asyncio.sleep(0)
        await self._working.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._working.__aexit__(None, None, None)
        self.gateway.close()
        self.intake.close()


@asynccontextmanager
async def listening(
    site: Site, most_waiting: int = 100, send_buffer: int | None = None, most_body_bytes: int = MAX_BODY_BYTES
) -> AsyncIterator[int]:
    """The site behind a real server; yields its port. most_waiting: connections without a request or its body. send_buffer: bytes
    that the system holds for each client; None: what it likes."""
    stop, ready = asyncio.Event(), asyncio.Event()
    with closing(listen("127.0.0.1", 0)) as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        waiting = WaitingConnections(most_waiting, site.metrics.connection_dropped, most_body_bytes)
        server = asyncio.create_task(serve_app(site.app, [listener], ready.set, stop.wait(), waiting, site.access.tls))
        await asyncio.wait_for(ready.wait(), 5)
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            await asyncio.wait_for(server, 10)
