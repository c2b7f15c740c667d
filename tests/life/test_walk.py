"""The walk: it passes every stage, and the documentation says how long it is."""

import re
from pathlib import Path

from tests.life.walk import STAGES, walk

RING = Path(__file__).resolve().parents[2] / "docs" / "architecture" / "ring.md"


def test_the_walk_passes_every_stage_and_is_no_longer_than_the_documentation_says() -> None:
    walked = walk()
    instances = {"the prefill instance", "the decode instance", "the detokenizer"}
    router = {"the router: request in", "the router: text to the client"}
    assert set(walked.stages) == instances | router | set(STAGES.values())
    rooms = {step.file.split("/")[0] for step in walked.path}
    assert rooms == {"router", "prefill", "decode", "kv_transfer", "engine", "common"}
    said = re.search(r"(\d+) functions in (\d+) files", RING.read_text())
    assert said is not None, "docs/architecture/ring.md quotes the walk's counts"
    assert len(walked.path) <= int(said[1]) and len({step.file for step in walked.path}) <= int(said[2])
