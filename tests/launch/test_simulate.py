"""`launch simulate` from its command line to its report. What a simulation finds is tested in tests/simulation."""

from pathlib import Path

import msgspec
import pytest

from launch.child import BAD_FLAG
from launch.main import main
from launch.simulate import Outcome, report

SMALL = ["simulate", "--requests=8", "--rate=20", "--mean-input=300", "--mean-output=5", "--heartbeat-s=0.25"]


def test_the_report_is_printed_and_its_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main([*SMALL, f"--json={file}"]) == 0
    outcome = msgspec.json.decode(file.read_bytes(), type=Outcome)
    assert outcome.found.endings == {"finished: length": 8}
    assert outcome.command == " ".join(["launch simulate", *sorted_as_given(file)])
    assert capsys.readouterr().out == report(outcome, markdown=False) + "\n"
    for heading in ("Requests:", "Time, ms:", "Instances:", "Control plane:", "CPU of this machine"):
        assert heading in report(outcome, markdown=False)
    assert f"```sh\n{outcome.command}\n```" in report(outcome, markdown=True)


def sorted_as_given(file: Path) -> list[str]:
    """In the order of the fields."""
    return ["--rate=20.0", "--requests=8", "--mean-input=300", "--mean-output=5", f"--json={file}", "--heartbeat-s=0.25"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--decode=0"], "--decode must be at least 1"),
        (["--rate=0"], "--rate must be above 0"),
        (["--step-cost=0,0,0"], "a step must take some time"),
        (["--kv-token-bytes=3"], "--kv-token-bytes must be even"),
        (["--trace=/nowhere.jsonl"], "--trace: /nowhere.jsonl cannot be read"),
        *(
            (["--trace=/nowhere.jsonl", flag], f"{flag.split('=')[0]} has no effect with --trace")
            for flag in ("--rate=9", "--requests=5", "--mean-input=9", "--mean-output=9", "--lengths=constant", "--arrivals=even")
        ),
        (["--speed=7"], "--speed has no effect without --trace"),
        (["--trace=/nowhere.jsonl", "--turns=2"], "--turns has no effect with --trace"),
        (["--think-s=1"], "--think-s has no effect without --turns"),
        (["--long-input=9"], "--long-input has no effect without --long-share"),
        (["--long-share=1.5"], "--long-share must be between 0 and 1"),
        (["--restart-s=1"], "--restart-s has no effect without --kill-every-s"),
    ],
)
def test_what_cannot_be_simulated_is_named(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == BAD_FLAG
    assert complaint in capsys.readouterr().err
