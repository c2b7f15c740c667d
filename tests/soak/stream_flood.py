"""python -m tests.soak.stream_flood: what one key waits for while another one floods the fleet with long streams.

Owns the flood and the figures. The fleet is `launch local` with two API keys; flags behind `--` are its own:

    python -m tests.soak.stream_flood --streams 1000 --seconds 60 -- --dispatch colocated

alice opens her streams at once and reads them; bob asks for three tokens, again and again. Knows nothing of the inside.
"""

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from common.processes.local_fleet import local_fleet
from tests.chaos.report import percentile

TIMEOUT_S = 60.0
"""A chat that has no answer by then counts as that long."""
WORDS = "the red fox runs over green hills while quiet rivers turn slow stones "


class Clients:
    """Of one router. url: of the router. keys: by name, with the one for control."""

    def __init__(self, url: str, keys: dict[str, str]) -> None:
        self._netloc = urlsplit(url).netloc
        self._keys = keys
        self.statuses: Counter[int] = Counter()
        self.events = 0

    async def post(self, name: str, asked: dict[str, object]) -> int:
        """Reads the whole answer, as it comes. Returns its status."""
        body = json.dumps({"model": "demo", **asked}).encode()
        host, port = self._netloc.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._netloc}\r\nConnection: close\r\n"
            head += f"Authorization: Bearer {self._keys[name]}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status = int((await reader.readline()).split()[1])
            if name == "alice":
                self.statuses[status] += 1
            while piece := await reader.read(65536):
                self.events += piece.count(b"data: ") if name == "alice" else 0
            return status
        finally:
            writer.close()

    async def steps(self) -> dict[str, int]:
        """How many forwards each instance has computed, as it last said."""
        headers = {"Authorization": f"Bearer {self._keys['control']}"}
        request = Request(f"http://{self._netloc}/cluster", headers=headers)
        told = await asyncio.to_thread(lambda: json.load(urlopen(request)))
        return {each["id"]: each["counters"]["steps"] for each in told["instances"]}

    async def flood(self, streams: int, words: int) -> None:
        async def stream(number: int) -> None:
            text = f"{number} " + (WORDS * (words // 13 + 1))[: words * 5]
            asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 3500, "ignore_eos": True, "stream": True}
            while await self.post("alice", asked) == 200:
                pass

        await asyncio.gather(*(stream(number) for number in range(streams)))

    async def chats(self, seconds: float, at_least: int) -> list[float]:
        """What each of bob's chats takes."""
        took_s: list[float] = []
        ends_s = time.monotonic() + seconds
        while len(took_s) < at_least or time.monotonic() < ends_s:
            began_s = time.monotonic()
            asked = {"messages": [{"role": "user", "content": f"hello {len(took_s)}"}], "max_tokens": 3, "ignore_eos": True}
            try:
                status = await asyncio.wait_for(self.post("bob", dict(asked)), TIMEOUT_S)
                if status != 200:
                    say(f"bob was refused: {status}")
                    await asyncio.sleep(0.2)
                    continue
                took_s.append(time.monotonic() - began_s)
            except TimeoutError:
                took_s.append(TIMEOUT_S)
        return took_s


async def run(url: str, keys: dict[str, str], flags: argparse.Namespace) -> None:
    clients = Clients(url, keys)
    await clients.chats(0, 5)
    tell("idle", await clients.chats(0, 50))
    flood = asyncio.create_task(clients.flood(flags.streams, flags.words))
    await asyncio.sleep(flags.before)
    events, steps, began_s = clients.events, await clients.steps(), time.monotonic()
    took_s = await clients.chats(flags.seconds, 1)
    tell("in the flood", took_s)
    seconds = time.monotonic() - began_s
    rate = (clients.events - events) / seconds
    say(f"alice: streams by status {dict(clients.statuses)}, {rate:.0f} tokens/s meanwhile")
    for name, count in (await clients.steps()).items():
        say(f"{name}: {1000 * seconds / max(1, count - steps[name]):.0f} ms from forward to forward")
    flood.cancel()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def tell(when: str, took_s: list[float]) -> None:
    late = sum(each >= TIMEOUT_S for each in took_s)
    figures = f"p50 {percentile(took_s, 0.5):.3f} s, p99 {percentile(took_s, 0.99):.3f} s, longest {max(took_s):.3f} s"
    say(f"bob {when}: {len(took_s)} chats, {figures}, {late} without an answer after {TIMEOUT_S:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000, help="how many alice opens (default: %(default)s)")
    parser.add_argument("--words", type=int, default=4, help="words of her prompts (default: %(default)s)")
    parser.add_argument("--before", type=float, default=10.0, help="seconds of flood before bob comes (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which bob asks (default: %(default)s)")
    parser.add_argument("fleet", nargs="*", help="flags of `launch local`, behind --")
    flags = parser.parse_args()
    keys = {name: secrets.token_hex(12) for name in ("alice", "bob", "control")}
    with tempfile.TemporaryDirectory() as folder:
        api_keys, control_key = Path(folder) / "api-keys", Path(folder) / "control-key"
        for path, text in (
            (api_keys, "".join(f"{name} {keys[name]}\n" for name in ("alice", "bob"))),
            (control_key, keys["control"]),
        ):
            path.touch(0o600)
            path.write_text(text)
        with local_fleet(f"--api-keys={api_keys}", f"--control-key={control_key}", *flags.fleet) as fleet:
            asyncio.run(run(fleet.url, keys, flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())
