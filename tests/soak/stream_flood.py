"""python -m tests.soak.stream_flood: what one key waits for while another one floods the fleet with long streams.

Owns the flood and the figures. The fleet is `launch local` with two API keys; flags behind `--` are its own:

    python -m tests.soak.stream_flood --streams 1000 --seconds 60 -- --dispatch colocated

alice opens her streams at once and reads them; bob asks for three tokens, again and again. Knows nothing of the inside.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter

from bench.client import USAGE_FIELDS, HttpClient, TimedAnswer
from common.processes.router_client import RequestFailed, RouterClient
from tests.rig.report import figures, keyed_fleet, say

PATH = "/v1/chat/completions"
TIMEOUT_S = 60.0
"""A chat that has no answer by then counts as that long."""
REFUSED_S = 0.2
"""How long bob waits when he was refused."""
STREAM_S = 3600.0
ALICE, BOB = "a" * 24, "b" * 24
WORDS = "the red fox runs over green hills while quiet rivers turn slow stones "


def body(text: str, max_tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"model": "demo", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}


class Flood:
    """alice's streams. Each that ends is followed by another one, until one is refused."""

    def __init__(self, url: str, words: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._client = HttpClient(url, PATH, {"Authorization": f"Bearer {ALICE}"}, STREAM_S)
        self._text = (WORDS * (words // 13 + 1))[: words * 5]
        self._answers: dict[int, TimedAnswer] = {}
        self._ended_tokens = 0

    @property
    def tokens(self) -> int:
        """How many have arrived so far."""
        return self._ended_tokens + sum(answer.counted for answer in self._answers.values())

    async def run(self, streams: int) -> None:
        await asyncio.gather(*map(self._stream, range(streams)))

    async def _stream(self, number: int) -> None:
        asked = json.dumps(body(f"{number} {self._text}", 3500) | {"stream": True} | USAGE_FIELDS["continuous"]).encode()
        while True:
            answer = self._answers[number] = TimedAnswer(due_s=0.0, requested_tokens=3500)
            await self._client.ask(answer, asked)
            self.outcomes[answer.error or "200"] += 1
            self._ended_tokens += self._answers.pop(number).counted
            if answer.error:
                return


def chats(bob: RouterClient, seconds: float, at_least: int) -> list[float]:
    """What each of bob's chats takes."""
    took_s: list[float] = []
    ends_s = time.monotonic() + seconds
    while len(took_s) < at_least or time.monotonic() < ends_s:
        began_s = time.monotonic()
        try:
            bob.post(PATH, body(f"hello {len(took_s)}", 3))
            took_s.append(time.monotonic() - began_s)
        except RequestFailed as error:
            if error.http_status is None and time.monotonic() - began_s >= TIMEOUT_S:
                took_s.append(TIMEOUT_S)
                continue
            say(f"bob was refused: {error}")
            time.sleep(REFUSED_S)
    return took_s


def steps(control: RouterClient) -> dict[str, int]:
    """How many forwards each instance has computed, as it last said."""
    return {each["id"]: each["counters"]["steps"] for each in control.get("/cluster")["instances"]}


async def run(bob: RouterClient, control: RouterClient, flags: argparse.Namespace) -> None:
    await asyncio.to_thread(chats, bob, 0, 5)
    tell("idle", await asyncio.to_thread(chats, bob, 0, 50))
    flood = Flood(bob.url, flags.words)
    flooding = asyncio.create_task(flood.run(flags.streams))
    await asyncio.sleep(flags.before)
    tokens, before, began_s = flood.tokens, await asyncio.to_thread(steps, control), time.monotonic()
    took_s = await asyncio.to_thread(chats, bob, flags.seconds, 1)
    tell("in the flood", took_s)
    seconds = time.monotonic() - began_s
    say(f"alice: ended streams {dict(flood.outcomes)}, {(flood.tokens - tokens) / seconds:.0f} tokens/s meanwhile")
    for name, count in (await asyncio.to_thread(steps, control)).items():
        say(f"{name}: {1000 * seconds / max(1, count - before[name]):.0f} ms from forward to forward")
    flooding.cancel()


def tell(when: str, took_s: list[float]) -> None:
    late = sum(each >= TIMEOUT_S for each in took_s)
    say(f"bob {when}: {figures(took_s)}, {late} without an answer after {TIMEOUT_S:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000, help="how many alice opens (default: %(default)s)")
    parser.add_argument("--words", type=int, default=4, help="words of her prompts (default: %(default)s)")
    parser.add_argument("--before", type=float, default=10.0, help="seconds of flood before bob comes (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which bob asks (default: %(default)s)")
    parser.add_argument("fleet", nargs="*", help="flags of `launch local`, behind --")
    flags = parser.parse_args()
    with keyed_fleet(*flags.fleet, timeout_s=TIMEOUT_S, alice=ALICE, bob=BOB) as clients:
        asyncio.run(run(clients["bob"], clients["control"], flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())
