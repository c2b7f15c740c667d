"""`launch bench overlap` with real fleets: a quick run and what it leaves; and what its client makes of answers that fail."""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import fleets
from bench.fleets import Fleet, Totals
from common.processes.local_fleet import FleetFailed

KV_BYTES = 2 * 2 * 2 * 32 * 4
"""Of a token in a quick run: layers, key and value, heads, size of a head, float32."""


def test_a_quick_run_measures_prints_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "launch.main", "bench", "overlap", "--quick", "--markdown", "--repeat", "2"]
    done = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("```sh\nlaunch bench overlap --quick --markdown --repeat=2 --json=")
    assert "| 496 | colocated |" in done.stdout and "### random: the transfer of a prompt" in done.stdout
    (model,) = json.loads(figures.read_text())["models"]
    assert model["prompt_tokens"] == {"1": 48, "2": 112, "8": 496}
    seen = sorted((each["round"], each["chunks"], each["fleet"]) for each in model["samples"])
    assert seen == sorted(
        (number, chunks, fleet) for number in (1, 2) for chunks in (1, 2, 8) for fleet in ("layer-wise", "page-wise", "colocated")
    )
    for each in model["samples"]:
        assert 0 < each["first_token_s"] < 60 and 0 <= each["next_token_s"] < 60
        if each["fleet"] == "colocated":
            assert each["pushed_bytes"] == each["push_s"] == each["exposed_s"] == 0
        else:
            assert each["pushed_bytes"] == KV_BYTES * model["prompt_tokens"][str(each["chunks"])]
            assert 0 < each["push_s"] < 60 and 0 <= each["exposed_s"] < 60


def event(*token_ids: int) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "token_ids": token_ids}]}


ENDING: dict[str, Any] = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}


class Stub(http.server.ThreadingHTTPServer):
    """A router with one instance. status, events: of the next answer. ended: what the instance has counted."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.events, self.counts = 200, [event(5), event(7), ENDING], True
        self.ended = 3
        self.asked: dict[str, Any] = {}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        counters = {"requests_ended": self.server.ended, "bytes_pushed": 10, "push_seconds": 0.5, "exposed_seconds": 0.25}
        instance = {"model": {"name": "stub"}, "counters": counters}
        self._answer(200, json.dumps({"instances": [instance]}).encode())

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.ended += self.server.counts
        events = [json.dumps(each) for each in self.server.events] + ["[DONE]"]
        self._answer(self.server.status, "".join(f"data: {each}\n\n" for each in events).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def fleet_of(stub: Stub) -> Fleet:
    return Fleet(f"http://127.0.0.1:{stub.server_address[1]}", instances=1)


def test_a_request_is_timed_token_by_token_and_counted(stub: Stub) -> None:
    arrivals, counted = fleet_of(stub).serve([4, 5, 6])
    assert 0 < arrivals.first_s <= arrivals.last_s
    assert counted == Totals(requests_ended=1) and arrivals.token_ids == (5, 7)
    assert (stub.asked["model"], stub.asked["prompt"], stub.asked["max_tokens"]) == ("stub", [4, 5, 6], 2)


def test_two_tokens_in_one_event_have_come_at_once(stub: Stub) -> None:
    stub.events = [event(5, 7), ENDING]
    arrivals, _ = fleet_of(stub).serve([4])
    assert arrivals.first_s == arrivals.last_s


@pytest.mark.parametrize(
    ("status", "events", "reason"),
    [
        (503, [], "HTTP 503"),
        (200, [event(5), {"error": {"message": "no instance is left"}}], "no instance is left"),
        (200, [event(5), ENDING], "1 tokens instead of 2"),
    ],
)
def test_an_answer_that_fails_is_no_sample(stub: Stub, status: int, events: list[dict[str, Any]], reason: str) -> None:
    stub.status, stub.events = status, events
    with pytest.raises(FleetFailed, match=reason):
        fleet_of(stub).serve([4])


def test_a_request_that_no_instance_counts_is_no_sample(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "COUNTED_S", 0.1)
    stub.counts = False
    with pytest.raises(FleetFailed, match="not over on each instance"):
        fleet_of(stub).serve([4])


def test_a_fleet_that_lacks_an_instance_is_not_measured(stub: Stub) -> None:
    with pytest.raises(FleetFailed, match="an instance has left"):
        Fleet(f"http://127.0.0.1:{stub.server_address[1]}", instances=2).serve([4])
