"""The live page in a real browser, over a fleet of processes under load: lanes come, fill and end, and a death is marked.

    python -m tests.soak.live_page --screenshots FOLDER

Owns what must be seen, and the pictures. The browser is that of `tests.soak.browser`; without one it says so and ends.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from common.processes.local_fleet import local_fleet
from common.processes.router_client import RequestFailed, RouterClient
from tests.rig.pages import NotInTime, RunningFleet, until
from tests.rig.report import CONTROL, Check, key_flags
from tests.soak.browser import Browser, browser, verdict

FLAGS = ("--prefill=2", "--decode=2", "--executor=timed", "--transport=cma", "--dtype=bfloat16", "--kv-memory=64MiB")
SLOW = ("--step-cost=0.02,0.0006,0.0008", "--chunk-tokens=256", "--log-level=warning")
STREAMS, PROMPT, ANSWER = 12, 900, 150
PATIENCE_S = 90.0
WATCHED = "<img/src=x/onerror=alert(1)>watched"
"""An id that would be a picture, if somebody took it for HTML."""
LANES = """
const done = arguments[arguments.length - 1];
const names = [...document.querySelectorAll('.lane-name')];
done(names.map((name) => [name.textContent, name.classList.contains('over')]));
"""
SEEN = """
const done = arguments[arguments.length - 1], text = (name) => document.getElementById(name).textContent;
done({
  connection: text('connection'), marks: text('marks'), asks: !document.getElementById('ask').hidden,
  cards: document.querySelectorAll('.station .card').length, pictures: document.images.length,
  bars: [...document.querySelectorAll('.bars i')].map((bar) => bar.className.split(' ')[0]),
  details: text('details-body'),
});
"""
CLICK = """
const [id, done] = arguments;
[...document.querySelectorAll('.lane-name')].find((name) => name.textContent === id)?.click();
setTimeout(done, 1500);
"""
HIDDEN = """
const done = arguments[arguments.length - 1], frames = [], draw = window.requestAnimationFrame;
window.requestAnimationFrame = (frame) => frames.push(frame);
setTimeout(() => {
  window.requestAnimationFrame = draw;
  frames.forEach((frame) => draw(frame));
  done(frames.length);
}, 4500);
"""
"""A page that is not seen gets no frames: those that it asks for come all together when it is seen again."""
STATIONS = """
const names = (role) => [...document.querySelectorAll(`#${role} .card .name`)].map((name) => name.textContent);
arguments[arguments.length - 1]({prefill: names('prefill'), decode: names('decode')});
"""
CARD = """
const [name, done] = arguments;
[...document.querySelectorAll('.card')].find((card) => card.textContent.startsWith(name)).click();
setTimeout(() => done(document.getElementById('details-body').textContent), 1500);
"""
ENTER = """
const [key, done] = arguments;
document.getElementById('key').value = key;
document.querySelector('#ask button').click();
setTimeout(done, 2500);
"""


@contextlib.contextmanager
def load(url: str) -> Iterator[None]:
    """STREAMS answers at once, until the end."""
    stop, router = threading.Event(), RouterClient(url)

    def client(number: int) -> None:
        sent = 0
        while not stop.is_set():
            sent += 1
            prompt = [10 + (number * 7 + sent * 13 + place) % 2000 for place in range(PROMPT)]
            body = {"model": "demo", "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "stream": True}
            with contextlib.suppress(RequestFailed):
                for _ in router.stream("/v1/completions", body):
                    pass

    threads = [threading.Thread(target=client, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        router.close()
        for thread in threads:
            thread.join()


def watched(fleet: RunningFleet, window: Browser) -> Iterator[Check]:
    """One request among the others, from its beginning to its end."""
    window.open(f"{fleet.url}/")
    until(lambda: window.run(SEEN)["connection"] == "live", "the page reads states", PATIENCE_S)
    body = json.dumps({"model": "demo", "prompt": [5] * PROMPT, "max_tokens": ANSWER, "ignore_eos": True}).encode()
    named = {"X-Request-Id": WATCHED, "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{fleet.url}/v1/completions", body, named)
    sending = threading.Thread(target=lambda: urllib.request.urlopen(asked, timeout=PATIENCE_S).close())
    sending.start()
    try:
        until(lambda: [WATCHED, False] in window.run(LANES), "the request has a lane", PATIENCE_S)
        until(lambda: [WATCHED, True] in window.run(LANES), "its lane has ended", PATIENCE_S)
        window.run(CLICK, WATCHED)
        seen = window.run(SEEN)
        yield Check(holds="least_loaded" in seen["details"], text=f"it says why it was placed: {seen['details'][:200]!r}")
        window.run("document.getElementById('close').click(); arguments[0]();")
        until(lambda: not any(WATCHED in lane for lane in window.run(LANES)), "its lane has gone", PATIENCE_S)
        yield Check(holds=True, text="a lane came, ended and went")
    except NotInTime as error:
        yield Check(holds=False, text=str(error))
    sending.join()
    seen = window.run(SEEN)
    yield Check(holds={"queue", "prefill", "push", "decode"} <= set(seen["bars"]), text=f"lanes have {sorted(set(seen['bars']))}")
    yield Check(holds=seen["cards"] == 5, text=f"{seen['cards']} cards: the router and four instances")
    yield Check(holds=seen["pictures"] == 0, text="an id with HTML in it is text")


def killed(fleet: RunningFleet, window: Browser) -> Iterator[Check]:
    """A decode instance dies while it serves."""
    pid = next(one["ranks"][0]["pid"] for one in fleet.cluster()["instances"] if one["role"] == "decode")
    os.kill(pid, signal.SIGKILL)
    until(lambda: "not heard of in time" in window.run(SEEN)["marks"], "its death is marked", PATIENCE_S)
    until(lambda: "resumed: lost instance" in window.run(SEEN)["marks"], "what it served is resumed", PATIENCE_S)
    yield Check(holds=True, text=f"a death and what was resumed are marked: {window.run(SEEN)['marks'][:120]!r}")


def changed(fleet: RunningFleet, window: Browser) -> Iterator[Check]:
    """An instance changes its role while the page is open, and the page is not seen for a while."""
    frames = window.run(HIDDEN)
    yield Check(holds=frames == 1, text=f"a page that is not seen for some seconds waits for {frames} frame")
    answer = fleet.post("/cluster/decode-1/role", {"role": "prefill"})
    until(lambda: "decode-1" in window.run(STATIONS)["prefill"], "it stands with the prefill instances", PATIENCE_S)
    until(lambda: "decode → prefill" in window.run(SEEN)["marks"], "its change is marked", PATIENCE_S)
    stations, details = window.run(STATIONS), window.run(CARD, "decode-1")
    holds = "decode-1" not in stations["decode"] and "roleprefill" in details
    yield Check(holds=holds, text=f"an instance changed its role ({answer.status}): {stations}, and says {details[:60]!r}")


def pictures(window: Browser, folder: Path, name: str) -> None:
    """Light, dark, and as on a phone."""
    for scheme, width, height, scale in (("light", 1300, 1250, 1.0), ("dark", 1300, 1250, 1.0), ("phone", 390, 1500, 1.5)):
        features = [{"name": "prefers-color-scheme", "value": "dark" if scheme == "dark" else "light"}]
        window.devtools("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": scheme == "phone"}
        window.devtools("Emulation.setDeviceMetricsOverride", **size)
        time.sleep(2.5)
        (folder / f"{name}-{scheme}.png").write_bytes(window.screenshot())
    window.devtools("Emulation.clearDeviceMetricsOverride")


def locked(fleet: RunningFleet, window: Browser) -> Iterator[Check]:
    """A router with a control key."""
    window.open(f"{fleet.url}/")
    time.sleep(1.0)
    yield Check(holds=window.run(SEEN)["asks"], text="the page asks for the control key")
    window.run(ENTER, "wrong" * 5)
    yield Check(holds=window.run(SEEN)["asks"], text="a wrong key is refused")
    window.run(ENTER, CONTROL)
    seen = window.run(SEEN)
    yield Check(holds=seen["connection"] == "live" and not seen["asks"], text=f"the right key opens it: {seen['connection']}")


def checks(folder: Path | None) -> Iterator[Check]:
    with browser() as window:
        with local_fleet(*FLAGS, *SLOW) as local, load(local.url):
            fleet = RunningFleet(local)
            yield from watched(fleet, window)
            if folder is not None:
                pictures(window, folder, "four")
            yield from killed(fleet, window)
            if folder is not None:
                pictures(window, folder, "kill")
            fleet.wait_until_whole("prefill-0", "prefill-1", "decode-0", "decode-1")
            yield from changed(fleet, window)
        said = window.run(CARD, "decode-0")
        yield Check(
            holds="roledecode" in said, text=f"a click says what is known of an instance when the router has gone: {said[:60]!r}"
        )
        with key_flags(page="p" * 24) as keys, local_fleet("--prefill=0", "--decode=1", *keys) as local:
            yield from locked(RunningFleet(local), window)
        expected = " 401 ", "ERR_CONNECTION"  # a key was refused, and the first fleet has gone
        complaints = [line for line in window.complaints() if not any(word in line for word in expected)]
        yield Check(holds=not complaints, text=f"the console says nothing: {complaints}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.live_page", description="The live page in a real browser.")
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER", help="where to write pictures, as PNG")
    flags = parser.parse_args()
    return verdict(checks(flags.screenshots))


if __name__ == "__main__":
    sys.exit(main())
