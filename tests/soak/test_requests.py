"""The soak of generated requests, in small: that it runs, and finds nothing."""

import pytest

from tests.soak import requests
from tests.soak.requests import Broken, Sender, send_all


def test_generated_requests_get_proper_answers_and_leave_nothing_open() -> None:
    statuses, left = send_all(64)
    assert left == []
    assert any(status == 200 for label, status in statuses if label == "POST /v1/completions")
    assert any(status == 400 for label, status in statuses if label == "POST /v1/completions")


def test_an_answer_that_no_request_may_get_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SAID_WHY", set())
    sender = Sender()
    sender._site.core.draining = True
    with pytest.raises(Broken, match="503"):
        sender.send("GET", "/ready", {}, "GET /ready")
    assert sender.close() == []
