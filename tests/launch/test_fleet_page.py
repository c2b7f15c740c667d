"""What `launch local` reads from the router's pages: who is missing, by name, and the first request to paste."""

import json
import shlex
from typing import Any

import pytest

from common.addresses import bind_address, reachable
from common.errors import ConfigError
from launch.fleet_page import FleetPage, curl_line


def link(peer: str, state: str = "ready", detail: str = "") -> dict[str, str]:
    return {"peer": peer, "state": state, "detail": detail}


def cluster(instances: dict[str, list[dict[str, str]]], unready: tuple[str, ...] = ()) -> dict[str, Any]:
    members = [{"id": name, "links": links} for name, links in instances.items()]
    return {"router": {"unready": list(unready)}, "instances": members}


COMPLETE = {"prefill-0": [link("decode-0")], "decode-0": [link("prefill-0")]}
CASES: list[tuple[str, dict[str, Any] | None, list[str]]] = [
    ("complete", cluster(COMPLETE), []),
    ("silent", None, ["the router does not answer"]),
    ("unready", cluster(COMPLETE, ("no decode instance",)), ["no decode instance"]),
    (
        "a member that did not join",
        cluster({"prefill-0": []}),
        [
            "decode-0 has not joined the fleet",
            "the link of prefill-0 to decode-0 is missing",
            "the link of decode-0 to prefill-0 is missing",
        ],
    ),
    (
        "a link that was lost",
        cluster(COMPLETE | {"prefill-0": [link("decode-0", "lost", "refused")]}),
        ["the link of prefill-0 to decode-0 is lost refused"],
    ),
]


@pytest.mark.parametrize(("page", "reasons"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_missing_is_named(page: dict[str, Any] | None, reasons: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetPage, "get", lambda self, path: page)
    assert FleetPage("http://127.0.0.1:1").missing(["prefill-0"], ["decode-0"]) == reasons


def test_a_router_that_does_not_listen_gives_no_page() -> None:
    assert FleetPage("http://127.0.0.1:1").get("/cluster") is None


def test_the_curl_line_survives_a_shell_whatever_the_model_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetPage, "get", lambda self, path: {"data": [{"id": 'it\'s "mine"'}]})
    words = shlex.split(curl_line("http://0.0.0.0:8000").replace("\\\n", ""))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == 'it\'s "mine"'


def test_an_address_on_every_interface_is_told_with_a_host_that_can_be_reached() -> None:
    assert reachable("tcp://0.0.0.0:8001", "10.1.2.3") == "tcp://10.1.2.3:8001"
    assert reachable("tcp://10.0.0.0:8001", "10.1.2.3") == "tcp://10.0.0.0:8001"


def test_a_host_that_is_none_is_refused_by_the_name_of_its_flag() -> None:
    assert bind_address("127.0.0.1", "--host") == "127.0.0.1"
    with pytest.raises(ConfigError, match="--host"):
        bind_address("no such host", "--host")
