"""What is asked: lengths, shared prefixes, blocks of traces, turns of conversations, and files that cannot be used."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.options import LoadOptions, ServeOptions, TargetOptions, WorkloadOptions
from bench.workloads import (
    LoadSession,
    LoadTurn,
    PromptVocabulary,
    prefix_sessions,
    prompt_of_blocks,
    prompt_vocabulary,
    random_sessions,
    read_trace,
    sessions_of,
    trace_sessions,
)
from common.config import DEMO_MODEL
from common.errors import ConfigError
from common.text.tokenizer_manager import TokenizerManager

IDS = PromptVocabulary(np.arange(100, 1100, dtype=np.int32), lambda ids: ids)


def ids_of(session: LoadSession) -> list[int]:
    content = session.turns[0].content
    assert not isinstance(content, str)
    found: list[int] = content.tolist()
    return found


def trace_file(tmp_path: Path, *lines: dict[str, Any] | str) -> str:
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def line(timestamp: float, tokens: int, blocks: list[int], output: int = 8) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": blocks}


def trace_of(plan: WorkloadOptions) -> list[LoadSession]:
    return trace_sessions(plan, IDS, read_trace(plan))


def test_random_lengths_lie_evenly_in_their_range_behind_a_prefix_that_all_share() -> None:
    plan = WorkloadOptions(random_input_len=10, random_output_len=20, random_range_ratio=0.5, random_prefix_len=3, prompts="ids")
    made = list(random_sessions(plan, IDS, 500))
    prompts = [ids_of(session) for session in made]
    assert {len(prompt) for prompt in prompts} == set(range(3 + 5, 3 + 15 + 1))
    assert {session.turns[0].output_tokens for session in made} == set(range(10, 30 + 1))
    assert len({tuple(prompt[:3]) for prompt in prompts}) == 1 and len({tuple(prompt) for prompt in prompts}) == 500
    assert prompts == [ids_of(session) for session in random_sessions(plan, IDS, 500)], "the same seed makes the same prompts"


def test_prompts_of_a_group_share_its_prefix_and_nothing_else() -> None:
    plan = WorkloadOptions(
        dataset_name="prefix_repetition",
        prompts="ids",
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=4,
        prefix_repetition_num_prefixes=3,
    )
    prompts = [ids_of(session) for session in prefix_sessions(plan, IDS, 9)]
    groups = [tuple(prompt[:8]) for prompt in prompts]
    assert sorted(groups.count(group) for group in set(groups)) == [3, 3, 3]
    assert len({tuple(prompt[8:]) for prompt in prompts}) == 9 and {len(prompt) for prompt in prompts} == {12}


def test_words_of_the_demo_model_are_as_many_tokens_as_were_asked_for() -> None:
    words, manager = prompt_vocabulary(DEMO_MODEL, "text"), TokenizerManager(DEMO_MODEL)
    sizes = (1, 2, 57, 300)
    for tokens in sizes:
        text = words.write(words.draw(np.random.default_rng(tokens), tokens))
        assert isinstance(text, str) and len(manager.encode(text)) == tokens
    (session,) = random_sessions(WorkloadOptions(dataset_name="conversation", random_input_len=5, conversation_turns=3), words, 1)
    assert [turn.input_tokens for turn in session.turns] == [5, 5, 5]


def test_equal_hash_ids_of_a_trace_are_equal_blocks_of_tokens(tmp_path: Path) -> None:
    path = trace_file(tmp_path, line(1000, 20, [7, 8, 9]), line(1500, 17, [7, 8, 4]), line(4000, 8, [9]))
    plan = WorkloadOptions(dataset_name="trace", dataset_path=path, trace_block_tokens=8, prompts="ids", trace_speed=2.0)
    sessions = trace_of(plan)
    first, second, third = map(ids_of, sessions)
    assert [session.due_s for session in sessions] == [0.0, 0.25, 1.5], "the first one is due at 0, and time is scaled"
    assert (len(first), len(second), len(third)) == (20, 17, 8)
    assert first[:16] == second[:16] and first[16:17] != second[16:]
    assert first[16:] == third[:4], "a block is the same wherever it stands"
    assert first[:8] != first[8:16]


@pytest.mark.parametrize("scale", [0.1, 0.37, 1.0, 2.5])
def test_scaled_lengths_keep_what_prompts_share(scale: float) -> None:
    tokens = [round(length * scale) for length in (2000, 1700)]
    one, other = (
        prompt_of_blocks(IDS, blocks, many, 512 * scale).tolist()
        for blocks, many in zip(([1, 2, 3, 4], [1, 2, 3, 5]), tokens, strict=True)
    )
    shared = int(np.ceil(3 * 512 * scale))
    assert (len(one), len(other)) == tuple(tokens)
    assert one[:shared] == other[:shared] and one[shared : len(other)] != other[shared:]


def test_a_part_of_a_trace_is_its_first_seconds_in_its_own_time(tmp_path: Path) -> None:
    path = trace_file(tmp_path, *(line(1000 * second, 4, [second]) for second in range(10)))
    common = {"dataset_name": "trace", "dataset_path": path, "prompts": "ids"}
    assert len(trace_of(WorkloadOptions(**common, trace_duration_s=3.0, trace_speed=10.0))) == 3  # type: ignore[arg-type]
    assert len(trace_of(WorkloadOptions(**common, num_prompts=2))) == 2  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="only 10 requests"):
        trace_of(WorkloadOptions(**common, num_prompts=11))  # type: ignore[arg-type]


def test_warm_ups_share_no_prompt_with_what_is_measured(tmp_path: Path) -> None:
    trace = WorkloadOptions(dataset_name="trace", dataset_path=trace_file(tmp_path, line(0, 600, [0, 1])), prompts="ids")
    for plan in (trace, WorkloadOptions(num_prompts=3, prompts="ids")):
        sessions = sessions_of(ServeOptions(workload=plan, load=LoadOptions(num_warmups=2)), DEMO_MODEL)
        prompts = [ids_of(session) for session in (*sessions.warmups, *sessions.measured)]
        assert len(sessions.warmups) == 2 and len({tuple(prompt) for prompt in prompts}) == len(prompts)


def test_a_later_turn_has_the_answers_so_far_before_it() -> None:
    system = {"role": "system", "content": "Be brief."}
    session = LoadSession((LoadTurn("One?", 4, before=(system,)), LoadTurn("Two?", 4)))
    assert session.prompt([]) == "Be brief.\nOne?"
    assert session.prompt([" Yes."]) == "Be brief.\nOne? Yes.Two?"
    asked, answered = {"role": "user", "content": "One?"}, {"role": "assistant", "content": " Yes."}
    assert session.messages([" Yes."]) == [system, asked, answered, {"role": "user", "content": "Two?"}]


def test_conversations_of_a_file_are_what_its_users_say(tmp_path: Path) -> None:
    openai = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    }
    share_gpt = {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "output_tokens": 9}
    path = trace_file(tmp_path, openai, share_gpt)
    plan = WorkloadOptions(dataset_name="conversation", dataset_path=path, num_prompts=3, custom_output_len=7)
    sessions = sessions_of(ServeOptions(workload=plan), DEMO_MODEL).measured
    said = [[(turn.content, turn.output_tokens) for turn in session.turns] for session in sessions]
    assert said == [[("a", 7), ("c", 7)], [("x", 9)], [("a", 7), ("c", 7)]], "lines are sent again when there are too few"


@pytest.mark.parametrize(
    ("dataset", "bad", "reason"),
    [
        ("trace", line(0, 600, [1]), "line 2 of .* too few hash_ids"),
        ("trace", '{"timestamp": 0}', "line 2 of .*input_length"),
        ("trace", line(0, 0, []), "line 2 of .*>= 1.*input_length"),
        ("custom", "{}", "line 2 of .* prompt or messages"),
        ("custom", {"messages": [{"role": "user", "content": "a"}]}, "line 2 of .* openai-chat"),
        ("custom", '{"prompt": 7}', "line 2 of "),
        ("conversation", {"messages": [{"role": "tool", "content": "a"}]}, "line 2 of .*tool"),
    ],
)
def test_a_line_that_cannot_be_used_is_refused_by_its_number(tmp_path: Path, dataset: Any, bad: Any, reason: str) -> None:
    good = line(0, 8, [1]) | {"prompt": "a"}
    if dataset == "conversation":
        good = {"messages": [{"role": "user", "content": "a"}]}
    plan = WorkloadOptions(dataset_name=dataset, dataset_path=trace_file(tmp_path, good, bad))
    with pytest.raises(ConfigError, match=reason):
        sessions_of(ServeOptions(workload=plan), DEMO_MODEL)


@pytest.mark.parametrize(
    ("plans", "flag"),
    [
        ({"workload": {"dataset_name": "custom"}}, "--dataset-path"),
        ({"workload": {"dataset_name": "random", "dataset_path": "x"}}, "--dataset-path"),
        ({"workload": {"dataset_name": "prefix_repetition", "random_input_len": 7}}, "--random-input-len"),
        ({"workload": {"dataset_name": "conversation", "prompts": "ids"}}, "--prompts"),
        ({"workload": {"dataset_name": "trace", "dataset_path": "x"}, "load": {"request_rate": 4.0}}, "--request-rate"),
        ({"workload": {"prompts": "ids"}, "target": {"backend": "openai-chat"}}, "--prompts"),
        ({"workload": {"random_range_ratio": 1.0}}, "--random-range-ratio"),
        ({"load": {"burstiness": 2.0}}, "--burstiness"),
        ({"load": {"ramp_up_strategy": "linear", "ramp_up_end_rps": 4.0}}, "--ramp-up-start-rps"),
        ({"load": {"extra_body": "[]"}}, "--extra-body"),
        ({"target": {"base_url": "localhost:8000"}}, "--base-url"),
        ({"target": {"base_url": "http://a", "port": 7}}, "--port"),
        ({"target": {"insecure": "on"}}, "--insecure"),
        ({"target": {"header": ("no value: here\n",)}}, "--header"),
    ],
)
def test_a_flag_that_is_wrong_or_would_change_nothing_is_refused_by_name(plans: dict[str, dict[str, Any]], flag: str) -> None:
    kinds = {"workload": WorkloadOptions, "load": LoadOptions, "target": TargetOptions}
    with pytest.raises(ConfigError, match=f"^{flag}"):
        ServeOptions(**{name: kinds[name](**fields) for name, fields in plans.items()})
