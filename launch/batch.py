"""`launch batch`: computes a file of requests, and writes a file of answers.

Owns the course of one batch. Knows the router's /v1/files and /v1/batches as any client does, whether the router runs already or
is started for this batch: so one mechanism computes all batches.
"""

import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.errors import INTERRUPTED, ConfigError
from common.options import option, refuse_without_effect, require
from common.processes.local_fleet import FleetFailed, local_fleet
from common.processes.router_client import RequestFailed, RouterClient

POLL_S = 1.0
AWAY_S = 60.0
"""How long the router may be away, or have no room: one that starts again goes on with the batch."""
PASSING = (None, 429, 502, 503, 504, 507)
"""Statuses after which another try may do better; None: no answer came."""
R = TypeVar("R")
BODY_BYTES = 2**20
"""What the body of an upload has beside the file, at most."""


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """What `launch batch` asks for."""

    input_file: str = option("", "file of requests: a JSON object in each line, with custom_id, method, url and body", letter="i")
    output_file: str = option("", "file to write: an answer in each line, those that failed at the end", letter="o")
    base_url: str = option("", "URL of a router that runs with --store; default: a fleet is started for the batch")
    api_key_file: str = option("", "file with the API key; default: the environment variable OPENAI_API_KEY, if it is set")
    fleet: str = option("--prefill 1 --decode 1", "FLAGS of `launch local`, in quotes: the fleet to start")

    def __post_init__(self) -> None:
        for name in ("input_file", "output_file"):
            require(bool(vars(self)[name]), name, "the name of a file", vars(self)[name])
        if self.base_url:
            refuse_without_effect(self, ("fleet",), "with --base-url")

    @property
    def fleet_flags(self) -> list[str]:
        """Raises ConfigError."""
        try:
            return shlex.split(self.fleet)
        except ValueError as error:
            raise ConfigError(f"--fleet: {error}") from error


def run(plan: BatchFlags, api_key: str) -> int:
    """Returns the exit status: 1 when a line failed. Raises ConfigError."""
    try:
        content = Path(plan.input_file).read_bytes()
        first = msgspec.json.decode(content.lstrip().partition(b"\n")[0], type=dict[str, Any])
        if Path(plan.output_file).exists() and Path(plan.output_file).samefile(plan.input_file):
            raise ConfigError("--output-file: this is the input file, which the answers would overwrite")
        Path(plan.output_file).write_bytes(b"")
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--input-file or --output-file: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        own = (f"--store={folder}/store", "--store-bytes=1000GiB", f"--max-body={len(content) + BODY_BYTES}")
        try:
            with contextlib.ExitStack() as fleet:
                url = plan.base_url or fleet.enter_context(local_fleet(*plan.fleet_flags, *own)).url
                batch = _compute(RouterClient(url, api_key or "none"), content, str(first.get("url")), Path(plan.output_file))
        except (RequestFailed, FleetFailed) as error:
            print(f"launch batch: {error}", file=sys.stderr)
            return 1
    if batch is None:
        return INTERRUPTED
    for each in (batch["errors"] or {"data": []})["data"]:
        print(f"{plan.input_file}, line {each['line']}: {each['message']}", file=sys.stderr)
    return 0 if batch["status"] == "completed" and not batch["request_counts"]["failed"] else 1


def _compute(client: RouterClient, content: bytes, endpoint: str, output: Path) -> Any:
    """The batch when it has ended; None: Ctrl-C ended it. Raises RequestFailed."""
    file = client.upload("/v1/files", {"purpose": "batch"}, "batch.jsonl", content)
    asked = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    batch, said = client.post("/v1/batches", asked), ""
    path = f"/v1/batches/{batch['id']}"
    try:
        while batch["status"] in ("validating", "in_progress", "cancelling"):
            time.sleep(POLL_S)
            batch = _patiently(partial(client.get, path))
            counts = batch["request_counts"]
            line = f"{batch['status']}: {counts['completed']} answered, {counts['failed']} failed, of {counts['total']}"
            if line != said:
                print(said := line, file=sys.stderr)
    except KeyboardInterrupt:
        client.post(f"{path}/cancel", {})
        return None
    names = filter(None, (batch["output_file_id"], batch["error_file_id"]))
    output.write_bytes(b"".join(_patiently(partial(client.read, f"/v1/files/{name}/content")) for name in names))
    return batch


def _patiently(call: Callable[[], R]) -> R:
    """What the router answers, if need be after some tries. Raises RequestFailed."""
    until_s = time.monotonic() + AWAY_S
    while True:
        try:
            return call()
        except RequestFailed as error:
            if error.http_status not in PASSING or time.monotonic() > until_s:
                raise
        time.sleep(POLL_S)
