"""The soak of generated requests, in small: that it runs, and finds nothing."""

import json

import pytest

from tests.router.fakes import MODEL
from tests.soak import requests
from tests.soak.requests import Broken, Sender, send_all


def test_generated_requests_get_proper_answers_and_leave_nothing_open() -> None:
    statuses, left = send_all(64, others=3)
    assert left == []
    assert any(status == 200 for label, status in statuses if label == "POST /v1/completions")
    assert any(status == 400 for label, status in statuses if label == "POST /v1/completions")


def test_an_answer_that_no_request_may_get_is_found() -> None:
    sender = Sender()
    sender._site.core.requests.is_draining = True
    with pytest.raises(Broken, match="503"):
        sender.send("GET", "/ready", {}, "GET /ready")
    assert sender.close() == []


def test_a_request_may_end_with_its_own_timeout_when_that_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SHORT_S", 0.01)
    sender = Sender()
    sender._site.fleet._stall_at = 0

    def send(**fields: float) -> None:
        body = {"model": MODEL, "prompt": "ab", **fields}
        sender.send("POST", "/v1/completions", {"content": json.dumps(body).encode()}, "completions")

    send(timeout=0.01)
    assert sender.statuses["completions", 504] == 1
    with pytest.raises(Broken, match=r"with timeout 0\.02 got 504"):
        send(timeout=0.02)
    assert sender.close() == []
