"""Two routers before one set of instances, as real processes: one dies, and the streams of the other do not notice.

`tests/life` proves what instances do about the requests of the dead one; here the kernel says that it is gone.
"""

import os
import re
import signal
from pathlib import Path

from tests.rig.client import Request, Streams
from tests.rig.pages import FleetPages, RunningFleet, running_fleet, until
from tests.rig.shared_memory import left_behind, shared_files

FLAGS = ("--routers", "2", "--executor", "timed", "--transport", "cma", "--step-cost", "0.01,0,0", "--kv-memory", "16MiB")
NAMES = ("prefill-0", "decode-0")
TOKENS = 200
EACH = 4
_OWN = re.compile(r"^router-\d .*\bown (http://\S+?),", re.MULTILINE)


def a_router(fleet: RunningFleet) -> int:
    """The process id of one of them."""
    return next(pid for pid in fleet.family() if "router" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))


def test_one_of_two_routers_is_killed_and_the_streams_of_the_other_finish_unharmed() -> None:
    before = shared_files()
    with running_fleet(*FLAGS) as fleet:
        urls = _OWN.findall(fleet.output)
        assert len(set(urls)) == 2
        for one, other in (urls, urls[::-1]):
            name = FleetPages(one).complete("falcon", 3)["id"]
            found = FleetPages(other).get(f"/requests/{name}")
            assert found.status == 200 and found.json()["id"] == name, "a request is found at any router behind the port"
            assert FleetPages(other).get(f"/requests/{name}?here=true").status == 404
        streams = {url: Streams(url, "demo", [Request.completion("falcon " * 40, TOKENS)] * EACH) for url in urls}
        for several in streams.values():
            several.wait_until_begun()
        os.kill(a_router(fleet), signal.SIGKILL)
        (dead,) = [url for url in urls if streams[url].wait_until_over()[0].errors]
        (survivor,) = [url for url in urls if url != dead]
        assert all("the stream broke off" in answer.errors[0] for answer in streams[dead].answers)
        assert [len(tokens) for tokens in streams[survivor].end()] == [TOKENS] * EACH
        pages = FleetPages(survivor)
        pages.wait_until_home(NAMES)
        assert not any(value for _, value in pages.samples("tandem_resumes_total")), "nothing was computed anew"
        until(FleetPages(dead).is_ready, "it is back at its port, and the instances have found it")
        assert FleetPages(dead).complete("falcon", 3)["usage"]["completion_tokens"] == 3
    assert not left_behind(before)
