"""What `launch local` reads from the router's pages: who is missing, by name, and the first request to paste."""

import json
import shlex
from typing import Any

import pytest

from common.addresses import bind_address, reachable
from common.errors import ConfigError
from launch.fleet_page import FleetPage, curl_line


def cluster(*names: str, usable: int = 1, unready: tuple[str, ...] = (), settled: bool = True) -> dict[str, Any]:
    """The page of a fleet with these members, of whose links so many can be used."""
    members = [{"id": name, "peers": 1, "usable": usable} for name in names]
    return {"router": {"unready": list(unready), "degraded": [], "settled": settled}, "instances": members}


COMPLETE = ("prefill-0", "decode-0")
CASES: list[tuple[str, dict[str, Any] | None, list[str]]] = [
    ("complete", cluster(*COMPLETE), []),
    ("silent", None, ["the router does not answer"]),
    ("unready", cluster(*COMPLETE, unready=("no decode instance",)), ["no decode instance"]),
    (
        "a member that did not join",
        cluster("prefill-0", usable=0),
        ["decode-0 has not joined the fleet"],
    ),
    ("peers that have not met", cluster(*COMPLETE, usable=0, settled=False), ["the instances are being told of each other"]),
    ("a link that was lost", cluster(*COMPLETE, usable=0), ["the link of prefill-0 to decode-0 is lost refused"]),
]


@pytest.mark.parametrize(("page", "reasons"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_missing_is_named(page: dict[str, Any] | None, reasons: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"links": [{"peer": "decode-0", "state": "lost", "detail": "refused"}]}
    monkeypatch.setattr(FleetPage, "get", lambda self, path: links if path == "/cluster?links=prefill-0" else page)
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
