"""`launch batch` against real fleets: one that runs and loses its router in the middle, and one that is started for the batch."""

import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from common.errors import ConfigError
from launch.batch import BatchFlags, run
from tests.rig.forks import module_process
from tests.rig.pages import RunningFleet, running_fleet, until

LINES, TOKENS = 60, 80
TIMED = "--prefill 0 --decode 1 --executor timed --step-cost 0.008,0,0 --kv-memory 16MiB"
"""A fleet without a model: its tokens follow from a request's seed and their positions."""


def asked(folder: Path, max_tokens: int) -> Path:
    """A file of requests."""
    file = folder / "asked.jsonl"
    body = {"model": "demo", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    rows = [
        {
            "custom_id": f"line-{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": body | {"prompt": f"Count from {n} to 90.", "seed": n},
        }
        for n in range(LINES)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@contextmanager
def launch_batch(file: Path, *flags: str) -> Iterator[Callable[[], tuple[int, str]]]:
    """Yields what waits for its end, and returns its status and what it said."""
    words = ["launch.main", "batch", "-i", str(file), "-o", str(file.with_suffix(".out")), *flags]
    with open(os.devnull) as nothing, file.with_suffix(".said").open("w+") as said:
        process = module_process(words, dict(os.environ), [nothing.fileno(), said.fileno(), said.fileno()])
        try:
            yield lambda: (process.wait(), Path(said.name).read_text())
        finally:
            process.send_signal(signal.SIGKILL)


def answers(file: Path) -> dict[str, str]:
    rows: list[Any] = [json.loads(line) for line in file.with_suffix(".out").read_text().splitlines()]
    assert len(rows) == len({row["custom_id"] for row in rows})
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}


def completed(store: Path) -> int:
    """How many lines have brought something, as the file itself says."""
    connection = sqlite3.connect(store)
    (count,) = connection.execute("SELECT count(*) FROM parts WHERE object > 1").fetchone()
    connection.close()
    return int(count)


def test_a_batch_outlives_a_kill_of_its_routers_and_background_responses_say_that_they_failed(tmp_path: Path) -> None:
    store, file = tmp_path / "store", asked(tmp_path, TOKENS)
    fleets = running_fleet(*TIMED.split(), "--batch-requests=4", "--store", str(store), "--routers=2")
    with fleets as fleet, launch_batch(file, "--base-url", fleet.url) as ended:
        until(lambda: store.exists() and completed(store) >= 5, "some lines have their answers")
        client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=3)
        create, routers = client.responses.create, fleet.running("router")
        computing = [create(model="demo", input=f"Say {n}.", max_output_tokens=400, background=True) for n in range(6)]
        assert completed(store) < LINES
        for pid in routers:  # at once, while the last responses are computed
            os.kill(pid, signal.SIGKILL)
        status, told = ended()
        assert status == 0, told
        states = {client.responses.retrieve(response.id).status for response in computing}
        assert "failed" in states and states <= {"failed", "completed"}
        expected = {f"line-{n}": _text(fleet, n) for n in (0, LINES // 2, LINES - 1)}
    got = answers(file)
    assert len(got) == LINES and expected.items() <= got.items()


def _text(fleet: RunningFleet, number: int) -> str:
    said = fleet.complete(f"Count from {number} to 90.", TOKENS, ignore_eos=True, seed=number)
    return str(said["choices"][0]["text"])


def test_a_batch_without_a_fleet_starts_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the fleet of the tests that starts as users start one: each process is a new interpreter, which loads all that it
    needs, and takes all apart at its end."""
    file = asked(tmp_path, 4)
    with file.open("a") as more:
        more.write('\n{"custom_id": "wrong", "method": "POST", "url": "/v1/completions", "body": {"max_tokens": "x"}}')
    fleet, answered = "--prefill 0 --decode 1 --grammar off --kv-memory 16MiB", str(file.with_suffix(".out"))
    status = run(BatchFlags(input_file=str(file), output_file=answered, fleet=fleet), "")
    told = capsys.readouterr().err
    assert status == 1 and f"completed: {LINES} answered, 1 failed, of {LINES + 1}" in told
    rows = [json.loads(line) for line in file.with_suffix(".out").read_text().splitlines()]
    assert len(rows) == LINES + 1 and rows[-1]["response"]["status_code"] == 400


def test_answers_never_overwrite_the_file_of_requests(tmp_path: Path) -> None:
    file = asked(tmp_path, 1)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="input file"):
        run(BatchFlags(input_file=str(file), output_file=str(file), base_url="http://127.0.0.1:1"), "")
    assert file.read_bytes() == before
