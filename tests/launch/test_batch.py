"""`launch batch` against a router that is played."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from launch import batch
from launch.batch import BatchFlags
from tests.launch.test_autoscale import Server


def test_a_batch_is_waited_for_while_the_router_has_no_room_or_is_away_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "POLL_S", 0.01)
    troubles = [429, 502, 503, 504, 507]
    done: dict[str, Any] = {
        "id": "batch_1",
        "status": "completed",
        "output_file_id": "file-2",
        "error_file_id": None,
        "errors": None,
    }
    done["request_counts"] = {"total": 1, "completed": 1, "failed": 0}

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "POST":
            return 200, {"id": "file-1"} if path == "/v1/files" else done | {"status": "in_progress"}
        return (troubles.pop(), {"error": {"message": "try again"}}) if troubles else (200, done)

    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}')
    with closing(Server(answer)) as server:
        flags = BatchFlags(input_file=str(asked), output_file=str(tmp_path / "out"), base_url=server.url)
        assert batch.run(flags, "") == 0 and not troubles
        troubles.append(404)
        assert batch.run(flags, "") == 1, "what another try does not mend ends it at once"
