"""`python -m benchmarks.ranks` measures real ranks: processes that obey the leader in this one, and end with the measurement."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.ranks import RanksBench, RanksFigures, main
from common.errors import ConfigError


def test_one_and_two_ranks_are_measured_and_only_the_second_has_a_follower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert main(["--ranks=1,2", "--rows=3", "--steps=20", f"--json={file}", "--markdown"]) == 0
    assert "| 2 | 3 |" in capsys.readouterr().out
    alone, two = msgspec.json.decode(file.read_bytes(), type=list[RanksFigures])
    assert (alone.ranks, two.ranks) == (1, 2) and alone.follower_cpu_us == 0 < two.follower_cpu_us
    assert min(alone.leader_cpu_us, two.leader_cpu_us, two.step_us) > 0


@pytest.mark.parametrize("flags", [{"ranks": "0,1"}, {"ranks": "65"}, {"rows": "0"}, {"steps": 0}])
def test_what_cannot_be_measured_is_refused(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(flags))}"):
        RanksBench(**flags)  # type: ignore[arg-type]
