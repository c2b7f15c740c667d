"""The load: lengths and times as asked for, and prompts that share what the trace says they share."""

from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from common.ids import unpack_ids
from router.timelines import BLOCK_TOKENS
from simulation.plan import LoadPlan
from simulation.workload import system_prompt, workload

TRACE = """\
{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 500, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 3]}
{"timestamp": 4000, "input_length": 600, "output_length": 1, "hash_ids": [4, 1]}
"""


def write(folder: Path, text: str) -> str:
    (folder / "trace.jsonl").write_text(text)
    return str(folder / "trace.jsonl")


def test_a_trace_is_played_as_it_is_or_faster_or_in_part(tmp_path: Path) -> None:
    trace = write(tmp_path, TRACE)
    as_it_is = list(workload(LoadPlan(trace=trace)))
    assert [(each.at_s, each.turns[0].input_tokens, each.turns[0].output_tokens) for each in as_it_is] == [
        (0.0, 1030, 5),
        (0.5, 1500, 7),
        (4.0, 600, 1),
    ]
    assert [each.at_s for each in workload(LoadPlan(trace=trace, speed=2.0))] == [0.0, 0.25, 2.0]
    assert len(list(workload(LoadPlan(trace=trace, duration_s=1.0)))) == 2


def test_equal_blocks_have_equal_tokens_and_others_do_not(tmp_path: Path) -> None:
    first, second, third = (unpack_ids(each.turns[0].prompt(1000)) for each in workload(LoadPlan(trace=write(tmp_path, TRACE))))
    assert [len(first), len(second), len(third)] == [1030, 1500, 600]
    assert (first[: 2 * BLOCK_TOKENS] == second[: 2 * BLOCK_TOKENS]).all()
    assert (first[2 * BLOCK_TOKENS :] != second[2 * BLOCK_TOKENS : 1030]).any()
    assert (third[BLOCK_TOKENS:] == second[BLOCK_TOKENS : BLOCK_TOKENS + 88]).all()
    assert (third[:BLOCK_TOKENS] != first[:BLOCK_TOKENS]).any()
    assert all(prompt.min() >= 0 and prompt.max() < 1000 for prompt in (first, second, third))


def test_random_loads_have_the_means_that_were_asked_for() -> None:
    load = LoadPlan(
        requests=1000, rate=5.0, turns=4, think_s=3.0, mean_input=700, mean_output=90, long_share=0.2, long_input=9000
    )
    coming = list(workload(load))
    turns = [turn for each in coming for turn in each.turns]
    assert (len(coming), len(turns)) == (1000, 4000)
    assert coming[-1].at_s == pytest.approx(1000 / 5.0, rel=0.1)
    assert np.mean([turn.input_tokens for turn in turns]) == pytest.approx(0.8 * 700 + 0.2 * 9000, rel=0.1)
    assert np.mean([turn.output_tokens for turn in turns]) == pytest.approx(90, rel=0.1)
    assert np.mean([turn.pause_s for each in coming for turn in each.turns[1:]]) == pytest.approx(3.0, rel=0.1)
    assert len({each.session for each in coming}) == 1000


def test_what_turns_add_is_nobody_elses_and_not_the_system_prompt() -> None:
    load = LoadPlan(requests=3, turns=2, system_tokens=1000, mean_input=600, lengths="constant")
    parts = [system_prompt(load, 1000), *(turn.prompt(1000) for each in workload(load) for turn in each.turns)]
    assert [len(unpack_ids(part)) for part in parts] == [1000, *[600] * 6]
    assert len({part[: 4 * 512] for part in parts}) == 7


def test_requests_of_a_trace_that_share_two_blocks_are_one_session(tmp_path: Path) -> None:
    first, second, third = workload(LoadPlan(trace=write(tmp_path, TRACE)))
    assert first.session == second.session != third.session


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 4"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1]}', "times must not fall"),
        ('{"timestamp": 9999, "input_length": 0, "output_length": 5, "hash_ids": [1]}', "at least 1"),
        ('{"timestamp": 9999, "input_length": 600, "output_length": 5, "hash_ids": [1]}', "too few hash_ids"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        list(workload(LoadPlan(trace=write(tmp_path, TRACE + line))))


def test_a_trace_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere\.jsonl"):
        workload(LoadPlan(trace="/nowhere.jsonl"))
