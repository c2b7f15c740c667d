"""The last hour as a trace: blocks that are the same have the same numbers, and nothing else is told."""

import json
from pathlib import Path
from random import Random

import httpx
import pytest

from common.ids import pack_ids
from common.pages.radix_cache import BlockNames
from router import timelines
from router.timelines import HOUR_S, LoadLine, PastLoad, lines_of
from simulation.workload import read_trace
from tests.router.calls import chat
from tests.router.fakes import Site

BLOCK = 512


def told(past: PastLoad, now: float = 0.0) -> list[LoadLine]:
    return list(lines_of(past.requests(now)))


@pytest.mark.parametrize("page_size", [16, 128])
def test_two_prompts_share_the_numbers_of_the_blocks_that_they_both_begin_with(page_size: int) -> None:
    """The reference compares the tokens themselves."""
    chance, past = Random(1), PastLoad()
    prompts: list[list[int]] = []
    for _ in range(40):
        base = chance.choice(prompts) if prompts and chance.random() < 0.8 else []
        kept = base[: chance.randrange(0, len(base) + 1)]
        prompts.append([*kept, *(chance.randrange(1000) for _ in range(chance.randrange(1, 1500)))])
        past.add(float(len(prompts)), len(prompts[-1]), 7, BlockNames.of(pack_ids(prompts[-1]), page_size), 0.0)
    lines = told(past)
    for one, line in zip(prompts, lines, strict=True):
        assert len(line.hash_ids) == -(-len(one) // BLOCK)
        for other, other_line in zip(prompts, lines, strict=True):
            if other is one:
                continue
            whole = [
                at for at in range(min(len(one), len(other)) // BLOCK) if one[: (at + 1) * BLOCK] == other[: (at + 1) * BLOCK]
            ]
            same = [at for at, (a, b) in enumerate(zip(line.hash_ids, other_line.hash_ids, strict=False)) if a == b]
            assert same == whole
    assert sorted({number for line in lines for number in line.hash_ids})[-1] < sum(len(line.hash_ids) for line in lines)


def test_requests_are_told_in_the_order_in_which_they_came_and_for_an_hour() -> None:
    past = PastLoad()
    past.add(100.0, 10, 3, None, 120.0)
    past.add(90.5, 600, 0, None, 130.0)
    assert [(each.timestamp, each.input_length, each.output_length) for each in told(past, 130.0)] == [(0, 600, 1), (9500, 10, 3)]
    assert told(past, 100.0 + HOUR_S + 1) == []


def test_only_so_many_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST_REQUESTS", 20)
    past = PastLoad()
    for number in range(25):
        past.add(float(number), 1, 1, None, float(number % 2))
    assert len(past.requests(0.0)) == 20


@pytest.mark.anyio
async def test_the_page_is_a_trace_that_a_simulation_reads_and_holds_nothing_that_was_said(
    site: Site, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    secret = "the prompt that nobody sees"
    for _ in range(3):
        assert (await client.post("/v1/chat/completions", json=chat(secret))).status_code == 200
    read = await client.get("/cluster/load")
    lengths = {(each.prompt_tokens, each.answer_tokens) for each in site.core.requests.past.requests(site.gateway.clock())}
    assert read.headers["content-type"] == "application/x-ndjson"
    assert {key for line in read.text.splitlines() for key in json.loads(line)} == {
        "timestamp", "input_length", "output_length", "hash_ids",
    }  # fmt: skip
    assert secret not in read.text
    file = tmp_path / "load.jsonl"
    file.write_text(read.text)
    assert {(each.turns[0].input_tokens, each.turns[0].output_tokens) for each in read_trace(str(file))} == lengths
