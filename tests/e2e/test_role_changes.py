"""A fleet of processes whose instances change their roles under load: each token is that of transformers, whoever computed it.

python -m pytest tests/e2e/test_role_changes.py --soak -s     # 100 changes each, 2 + 2, with ranks, and 4 + 4 with kills

What else an answer may be made of (an adapter, a grammar, tools, drafts, several choices) is asked of the demo model, and held
against the answers of the same fleet when nothing changes.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.evaluate import MODEL
from tests.e2e.test_token_exact import LLAMA, Reference
from tests.engine.lora_folders import ATTENTION, EVERY, Lora
from tests.rig import client as rig
from tests.rig.client import Answer, Client, Request
from tests.rig.pages import PATIENCE_S, RunningFleet, kill, running_fleet, until, until_nothing_lacks
from tests.rig.report import percentile, say
from tests.soak.endpoints import TEMPLATE

ROUNDING = 1e-4
"""Two tokens whose logits differ by less may both be drawn."""
QUIET_S = 4.0
FLAGS = ("--dtype", "float32", "--grammar", "off", "--dead-after-s", "60", "--heartbeat-s", "0.1")
ROLES = ("prefill", "decode", "both")


class Streams(threading.Thread):
    """Clients that stream one answer after the other, until they are told to stop."""

    def __init__(self, url: str, model: str, at_once: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._url, self._model, self._at_once, self._random = url, model, at_once, Random(seed)
        self.answers: list[Answer] = []
        self._stops = threading.Event()
        self.start()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with Client(self._url, self._model) as client:
            await asyncio.gather(*(self._ask(client) for _ in range(self._at_once)))

    async def _ask(self, client: Client) -> None:
        while not self._stops.is_set():
            random = self._random
            prompt = tuple(random.randrange(300, 2000) for _ in range(random.choice((5, 60, 200))))
            body = {"prompt": list(prompt), "max_tokens": random.choice((8, 32, 96)), "temperature": 0, "ignore_eos": True}
            shown = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
            self.answers.append(await client.ask(Request("/v1/completions", body | shown, prompt=prompt)))

    def stop(self) -> None:
        self._stops.set()
        self.join(120.0)
        assert not self.is_alive(), "the streams go on and on"

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """The times between two arrivals of an answer, within this time."""
        gaps = [gap for answer in self.answers for choice in answer.gaps() for gap in choice if not gap.is_first]
        return [gap.seconds for gap in gaps if start_s < gap.start_s and gap.end_s < end_s]


@dataclass
class Changes:
    """What became of orders to change a role."""

    seconds: list[float] = field(default_factory=list)
    """From each order until the instance served."""
    first_token_s: list[float] = field(default_factory=list)
    """Until it was seen to have sent a token in the new role."""
    lives: list[tuple[str, str, float, float, float]] = field(default_factory=list)
    """The name and role of each life that began, and when it was ordered, served, and had a link to use: UNIX times."""
    refused: list[str] = field(default_factory=list)

    def order(self, fleet: RunningFleet, random: Random) -> None:
        """Some instance takes another role; a prefill and a decode instance are always left."""
        members = fleet.members()
        roles = [member["role"] for member in members.values()]
        name = random.choice(sorted(members))
        least = 2 if members[name]["role"] != "prefill" else 1
        able = [role for role in ROLES if role != members[name]["role"]]
        if sum(role != "prefill" for role in roles) < 2 and members[name]["role"] != "prefill":
            able.remove("prefill")
        if roles.count("prefill") < least and members[name]["role"] == "prefill":
            return
        began_s, ordered_s = time.monotonic(), time.time()
        reply = fleet.post(f"/cluster/{name}/role", {"role": random.choice(able)})
        if reply.status != 200:
            self.refused.append(reply.text)
            return
        self.seconds.append(time.monotonic() - began_s)
        life = reply.json()["incarnation"]
        if life != members[name]["incarnation"]:
            role, served_s = "prefill" if reply.json()["role"] == "prefill" else "decode", time.time()
            until(lambda: is_linked(fleet, name, life), f"a link of {name}")
            self.lives.append((name, role, ordered_s, served_s, time.time()))
            until(lambda: has_answered(fleet, name, life), f"a token of {name} as {reply.json()['role']}")
            self.first_token_s.append(time.monotonic() - began_s)

    def parts(self, fleet: RunningFleet, answers: Sequence[Answer]) -> dict[str, list[float]]:
        """What the time to the first token of a new life is made of, by the timelines of the requests."""
        served: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for answer in answers:
            for choice in fleet.get(f"/requests/{answer.id}").json()["choices"]:
                for each in chain.from_iterable(attempt["instances"] for attempt in choice["attempts"]):
                    served[each["id"], each["role"]].append(each["times"])
        parts: dict[str, list[float]] = defaultdict(list)
        for name, role, ordered_s, served_s, linked_s in self.lives:
            times = [each for each in served[name, role] if each["accepted_s"] > ordered_s]
            tokens = [
                each.get("first_decode_s" if "handed_off_s" in each and role == "decode" else "last_chunk_s") for each in times
            ]
            if any(tokens):
                asked_s, token_s = min(each["accepted_s"] for each in times), min(filter(None, tokens))
                parts["order to served"].append(served_s - ordered_s)
                parts[f"served to linked, {role}"].append(linked_s - served_s)
                parts[f"linked to asked, {role}"].append(asked_s - linked_s)
                parts[f"asked to token, {role}"].append(token_s - asked_s)
                parts["order to token"].append(token_s - ordered_s)
        return parts


def is_linked(fleet: RunningFleet, name: str, life: str) -> bool:
    """Some pair of it can be used. A prefill instance knows its pairs."""
    members = fleet.members()
    member = members.get(name)
    if member is None or member["incarnation"] != life or member["role"] != "prefill":
        return True
    return bool(member["usable"])


def has_answered(fleet: RunningFleet, name: str, life: str) -> bool:
    member = fleet.members().get(name)
    return member is not None and (member["incarnation"] != life or member["counters"]["tokens_generated"] > 0)


def check(answers: Sequence[Answer], reference: Reference) -> None:
    for answer in answers:
        assert not answer.errors, answer.errors
        (choice,) = answer.choices
        assert len(choice.token_ids) == answer.request.max_tokens
        regrets = reference.regrets(answer.request.prompt, choice.token_ids)
        assert max(regrets) < ROUNDING, regrets


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp("model")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)
    AutoModelForCausalLM.from_config(LLAMA).eval().save_pretrained(path)
    yield path


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("count", "at_once", "streams", "kills", "flags"),
    [
        pytest.param(4, 6, 0, 2, ("--prefill", "1", "--decode", "2"), id="a few, with kills"),
        pytest.param(100, 6, 3500, 0, ("--prefill", "2", "--decode", "2"), marks=pytest.mark.soak, id="two and two"),
        pytest.param(50, 32, 3000, 0, ("--prefill", "2", "--decode", "2"), marks=pytest.mark.soak, id="busy"),
        pytest.param(50, 6, 1500, 0, ("--prefill", "2", "--decode", "2", "--tp", "2"), marks=pytest.mark.soak, id="ranks"),
        pytest.param(
            100, 6, 5000, 20, ("--prefill", "4", "--decode", "4"), marks=pytest.mark.soak, id="four and four, with kills"
        ),
    ],
)
def test_no_token_is_lost_repeated_or_wrong_while_instances_change_their_roles(
    model: Path, count: int, at_once: int, streams: int, kills: int, flags: tuple[str, ...]
) -> None:
    random, changes, reference = Random(count), Changes(), Reference.load(model)
    with running_fleet("--model", str(model), *FLAGS, *flags) as fleet, ExitStack() as stack:
        names = list(fleet.members())
        clients = Streams(fleet.url, fleet.model(), at_once=at_once, seed=count)
        stack.callback(clients.stop)
        until(lambda: len(clients.answers) > 3, "the first answers")
        quiet_s = time.monotonic()
        time.sleep(QUIET_S if streams else 0.0)
        began_s = time.monotonic()
        for number in range(count):
            changes.order(fleet, random)
            answered = len(clients.answers)
            until(lambda answered=answered: len(clients.answers) > answered + streams // count, "answers", 300.0)  # type: ignore[misc]
            if kills and number % (count // kills) == 0:
                victim = random.choice(list(fleet.members().values()))
                kill(victim)
                former = {victim["id"]: victim["incarnation"]}
                until_nothing_lacks(lambda former=former: fleet.not_whole(names, former), PATIENCE_S)  # type: ignore[misc]
        ended_s = time.monotonic()
        clients.stop()
        fleet.wait_until_home(names)
        parts = changes.parts(fleet, clients.answers) if streams else {}
    assert not changes.refused, changes.refused
    check(clients.answers, reference)
    assert sum(answer.tokens for answer in clients.answers) > 0 and changes.seconds
    quiet, busy = clients.gaps_s(quiet_s, began_s), clients.gaps_s(began_s, ended_s)
    if streams:
        say(
            f"{len(changes.seconds)} changes of role in {len(clients.answers)} streams: served after {summary(changes.seconds)}",
            f"first token in the new role after {summary(changes.first_token_s)}",
            *(f"  {part}: {summary(seconds)}" for part, seconds in parts.items()),
            f"between tokens: quiet {summary(quiet)}, meanwhile {summary(busy)}",
        )


def summary(seconds: Sequence[float]) -> str:
    return f"{percentile(seconds, 0.5):.3f} / {percentile(seconds, 0.99):.3f} s (p50 / p99)" if seconds else "nothing"


# --- what an answer may be made of ----------------------------------------------------------------------------------------------

WORDS = "red apple, green pear, blue plum, "
LINES = {"type": "array", "items": {"type": "string", "minLength": 4, "maxLength": 8}, "minItems": 9, "maxItems": 9}
NOTE = {"type": "object", "properties": {"lines": LINES}, "required": ["lines"], "additionalProperties": False}
AS_JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}}, "frequency_penalty": 2.0}
WITH_TOOLS = {"tools": [{"type": "function", "function": {"name": "note", "parameters": NOTE}}], "tool_choice": "required"}
SEEDED = {"temperature": 1.0, "seed": 5}
LENGTH = 96


def chat(**fields: object) -> Request:
    body = Request.completion("", LENGTH, **fields).body | {"messages": [{"role": "user", "content": "Nine lines, please."}]}
    return Request("/v1/chat/completions", {name: value for name, value in body.items() if name != "prompt"})


KINDS = (
    Request.completion(WORDS, LENGTH, ignore_eos=True, model="one"),
    Request.completion(WORDS, LENGTH, ignore_eos=True, model="two", **SEEDED),
    Request.completion(4 * WORDS, LENGTH, ignore_eos=True),  # whose tokens are looked up
    Request.completion(WORDS, LENGTH, ignore_eos=True, n=2, logprobs=2, **SEEDED),
    Request.completion(WORDS, LENGTH, ignore_eos=True, presence_penalty=0.5, min_tokens=9),
    chat(**AS_JSON),
    chat(**AS_JSON, **SEEDED),
    chat(**AS_JSON, model="one"),
    chat(**WITH_TOOLS),
    chat(**WITH_TOOLS, **SEEDED, model="two"),
)
ORDERS = (
    (("decode-1", "prefill"), ("decode-1", "decode")),
    (("decode-1", "prefill"), ("prefill-0", "both")),
    (("prefill-0", "prefill"), ("decode-1", "both"), ("decode-0", "prefill"), ("decode-0", "decode")),
)
"""Back to back, while all kinds are streamed; the roles of one line are where the next one begins."""
NGRAM, MODEL_DRAFTS = '{"method": "ngram"}', '{"method": "draft_model", "model": "demo", "num_speculative_tokens": 4}'


def streamed(fleet: RunningFleet, requests: Sequence[Request]) -> rig.Streams:
    return rig.Streams(fleet.url, fleet.model(), requests)


def said(answers: Sequence[Answer]) -> list[list[tuple[list[int], str, str | None]]]:
    assert [answer.errors for answer in answers] == [[]] * len(answers)
    return [[(choice.token_ids, choice.text, choice.finish_reason) for choice in answer.choices] for answer in answers]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rounds", "drafts"), [(2, NGRAM), (6, MODEL_DRAFTS)], ids=["looked up", "drafted"])
def test_answers_of_every_kind_are_those_of_a_fleet_whose_roles_stay(tmp_path: Path, rounds: int, drafts: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    one = Lora(seed=1, rank=4, modules=ATTENTION).saved(base, tmp_path / "one")
    two = Lora(seed=2, rank=8, modules=EVERY).saved(base, tmp_path / "two")
    adapters = ("--max-loaded-loras", "2", "--lora", f"one={one},two={two}")
    tools = ("--chat-template", TEMPLATE, "--tool-parser", "hermes")
    with running_fleet(
        "--prefill", "1", "--decode", "2", "--speculative-config", drafts, *FLAGS, "--grammar", "on", *adapters, *tools
    ) as fleet:
        names = sorted(fleet.members())
        quiet = said(streamed(fleet, KINDS).wait_until_over())
        for orders in rounds * ORDERS:
            streams = streamed(fleet, KINDS)
            until(lambda streams=streams: sum(answer.tokens for answer in streams.answers) > 50, "tokens")  # type: ignore[misc]
            for name, role in orders:
                reply = fleet.post(f"/cluster/{name}/role", {"role": role})
                assert reply.status == 200, reply.text
            assert said(streams.wait_until_over()) == quiet
        fleet.wait_until_home(names)
