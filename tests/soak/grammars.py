"""python -m tests.soak.grammars: a storm of grammars over vocabularies of odd sizes, amid kills.

For each size it makes a small model with random weights, and the demo's tokenizer with more words,
and starts a fleet. The same requests are answered at rest and then many at a time, again and again,
while a rank of some instance is killed every few seconds.

Owns the models, the requests and the verdict: no instance ended that was not killed, no request
failed, each answer is that of the fleet at rest, and what ended by itself matches its grammar.
Exit status 1: not so.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import TypeAlias

import jsonschema_rs
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.options import add_flags, option, read_config
from common.processes.local_fleet import FleetFailed
from tests.random_schemas import random_schema
from tests.rig.pages import PATIENCE_S, FleetPages, Json, RunningFleet, running_fleet, until_nothing_lacks
from tests.rig.report import Check, print_checks, say

DEMO = Path("demo/model")
UNUSED = 3
"""So many of the model's last ids are no token of its tokenizer."""
CALM_S = 3.0
"""At most so long between a fleet that is whole and the next kill."""
AT_REST, AT_ONCE = 2, 8
"""How many requests are open at the same time, at rest and in the storm."""
PATTERNS = (
    "[a-z]{3,8}( [a-z]{3,8}){2,6}",
    "[0-9]{4}-(0[1-9]|1[0-2])",
    "(ja|nein|日本語)(, (ja|nein|日本語)){0,9}",
    "[^a-z]{5,60}",
)
SHAPELESS: tuple[Json, ...] = (
    {"type": "array", "maxItems": 3},
    {"type": "array", "minItems": 1, "maxItems": 9},
    {"type": "object", "minProperties": 1, "maxProperties": 4},
)
DEATH = re.compile(r"^\w+-\d+ +ended, and is started again", re.MULTILINE)
EBNF = 'root ::= word ("-" word){2,8}\nword ::= [a-z] [a-z0-9]*'
AS_REGEX = "[a-z][a-z0-9]*(-[a-z][a-z0-9]*){2,8}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    sizes: str = option("32001,49155,50257", "the vocabularies, apart by commas")
    tp: int = option(2, "ranks of each instance")
    minutes: float = option(1.5, "how long each fleet is in the storm")
    requests: int = option(60, "different ones")
    seed: int = option(1, "of requests and kills")
    speculative_config: str = option("", "the instances' flag: how they draft tokens")


Form: TypeAlias = tuple[Json, Callable[[str], object]]
"""Fields of a request, and what judges a text that ended by itself."""


@dataclass(slots=True)
class Asked:
    prompt: list[int]
    fields: Json
    matches: Callable[[str], object]
    at_rest: list[int] = field(default_factory=list)
    """The tokens of the answer of a fleet at rest."""


@dataclass(slots=True)
class Storm:
    """What a storm brought."""

    answers: int = 0
    ended: int = 0
    """Answers with a grammar that ended by themselves."""
    kills: int = 0
    wrong: list[str] = field(default_factory=list)


def write_model(folder: Path, size: int) -> Path:
    """A model with this vocabulary: the demo's tokens, and words of three or four letters."""
    for path in DEMO.iterdir():
        if "token" in path.name or path.suffix == ".jinja":
            shutil.copy(path, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    words = ("".join(letters) for length in (3, 4) for letters in product(ascii_lowercase, repeat=length))
    for word in words:
        if len(vocab) == size - UNUSED:
            break
        vocab.setdefault(word, len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    torch.manual_seed(size)
    config = Qwen3Config(
        vocab_size=size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, tie_word_embeddings=True, max_position_embeddings=4096, initializer_range=0.2, eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def requests(plan: Plan, size: int) -> Iterator[Asked]:
    random = Random(f"{plan.seed} {size}")
    for number in range(plan.requests):
        prompt = [random.randrange(3, size - UNUSED) for _ in range(random.choice((3, 30, 300)))]
        fields, matches = random.choice(FORMS)(random)
        fields |= {"seed": number, "temperature": random.choice((0, 1))}
        yield Asked(prompt, fields | {"max_tokens": random.choice((20, 200))}, matches)


def _json(random: Random) -> Form:
    schema = random.choice((random_schema(random), random.choice(SHAPELESS)))
    return _held_to("json", schema), partial(_is_valid, schema)


def _regex(random: Random) -> Form:
    pattern = random.choice(PATTERNS)
    return _held_to("regex", pattern), re.compile(pattern).fullmatch


def _ebnf(random: Random) -> Form:
    return _held_to("grammar", EBNF), re.compile(AS_REGEX).fullmatch


def _plain(random: Random) -> Form:
    fields = random.choice(({}, {"logprobs": 2}, {"presence_penalty": 1.0}, {"ignore_eos": True}))
    return dict(fields), lambda text: True


FORMS: tuple[Callable[[Random], Form], ...] = (_json, _json, _json, _regex, _ebnf, _plain)


def _held_to(kind: str, grammar: str | Json) -> Json:
    return {"structured_outputs": {kind: grammar}}


def _is_valid(schema: Json, text: str) -> bool:
    try:
        return jsonschema_rs.is_valid(schema, json.loads(text))
    except ValueError:
        return False


def ask(fleet: FleetPages, asked: Asked) -> Json:
    """The one choice of the answer. Raises FleetFailed."""
    choice: Json = fleet.complete(asked.prompt, return_token_ids=True, **asked.fields)["choices"][0]
    return choice


def at_rest(fleet: FleetPages, every: list[Asked]) -> None:
    with ThreadPoolExecutor(AT_REST) as pool:
        choices = pool.map(partial(ask, fleet), every)
        for asked, choice in zip(every, choices, strict=True):
            asked.at_rest = choice["token_ids"]


def endure(fleet: RunningFleet, every: list[Asked], plan: Plan, storm: Storm) -> None:
    """Ask and kill until the time is up."""
    over, random = threading.Event(), Random(plan.seed)

    def client(number: int) -> None:
        random = Random(f"{plan.seed} {number}")
        while not over.is_set():
            asked = random.choice(every)
            try:
                choice = ask(fleet, asked)
            except FleetFailed as error:
                storm.wrong.append(f"{asked.fields}: {error}")
                continue
            storm.answers += 1
            if choice["token_ids"] != asked.at_rest:
                storm.wrong.append(f"{asked.fields}: {choice['token_ids']} in place of {asked.at_rest}")
            if choice["finish_reason"] == "stop" and "structured_outputs" in asked.fields:
                storm.ended += 1
                if not asked.matches(choice["text"]):
                    storm.wrong.append(f"{asked.fields}: {choice['text']!r}")

    names = sorted(fleet.members())
    until_s = time.monotonic() + 60 * plan.minutes
    with ThreadPoolExecutor(AT_ONCE) as pool:
        clients = [pool.submit(client, number) for number in range(AT_ONCE)]
        try:
            while time.monotonic() < until_s:
                time.sleep(random.uniform(0, CALM_S))
                member = fleet.members()[random.choice(names)]
                os.kill(random.choice(member["ranks"])["pid"], signal.SIGKILL)
                storm.kills += 1
                lacks = partial(fleet.not_whole, names, {member["id"]: member["incarnation"]})
                until_nothing_lacks(lacks, PATIENCE_S)
        finally:
            over.set()
        for each in clients:
            each.result()
    fleet.wait_until_home(names)


def judge(plan: Plan, size: int) -> Iterator[Check]:
    every, storm = list(requests(plan, size)), Storm()
    with tempfile.TemporaryDirectory(prefix="tandem-grammars-") as folder:
        model = write_model(Path(folder), size)
        flags = (f"--model={model}", "--dtype=float32", "--kv-memory=64MiB", "--threads=1", f"--tp={plan.tp}")
        drafts = [f"--speculative-config={plan.speculative_config}"] if plan.speculative_config else []
        with running_fleet(*flags, *drafts, "--prefill=1", "--decode=2") as fleet:
            at_rest(fleet, every)
            endure(fleet, every, plan, storm)
            deaths = len(DEATH.findall(fleet.output))
    say(
        f"{size} tokens: {storm.answers} answers, {storm.ended} of them ended by themselves, {storm.kills} kills",
        *storm.wrong[:9],
    )
    yield Check(holds=not storm.wrong and storm.ended > 0, text=f"{len(storm.wrong)} answers of {storm.answers} were wrong")
    yield Check(holds=deaths == storm.kills > 0, text=f"{deaths} instances ended, and {storm.kills} were killed")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.grammars", description="Grammars over vocabularies of odd sizes.")
    add_flags(parser, Plan)
    plan = read_config(Plan, parser.parse_args())
    return print_checks(check for size in plan.sizes.split(",") for check in judge(plan, int(size)))


if __name__ == "__main__":
    sys.exit(main())
