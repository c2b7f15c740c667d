"""Drafts: against a lookup that a person would write, depths against all depths there are, and the flags that ask for them."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.drafting import DRAFTS, LONGEST, SHORTEST, Drafting, parse_drafting
from common.errors import ConfigError
from common.step_cost import StepCost
from decode.speculation import TURN_S, NgramDrafter, Speculation, worth

CONTEXT = 32_768
"""So large that no two of these n-grams have the same place."""


def followed_by(tokens: list[int], sizes: tuple[int, ...], most: int) -> list[int] | None:
    """What followed the last tokens when they were last there; None: they were not."""
    for size in sizes:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                known = list(tokens)
                for at in range(most):
                    known.append(known[end + at])
                return known[len(tokens) :]
    return None


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 2), max_size=20)), max_size=4
    ),
    st.sampled_from([(2,), (3, 2), (4, 2), (3, 1)]),
)
def test_what_is_proposed_followed_the_same_tokens_when_they_were_last_there(
    answers: list[tuple[list[int], list[int]]], sizes: tuple[int, ...]
) -> None:
    """Rows advance beside each other, and each was another request's before."""
    drafter, known = NgramDrafter(4, CONTEXT, sizes), dict[int, list[int]]()
    for row in range(4):
        drafter.begin(row, np.array([2, 0, 1, 2, 0, 1, 2, 0, 1], dtype=np.int32))
    for row, (prompt, _) in enumerate(answers):
        drafter.begin(row, np.array(prompt, dtype=np.int32))
        known[row] = list(prompt)
    for step in range(max((len(answer) for _, answer in answers), default=0) + 1):
        rows = np.array(list(known), dtype=np.int64)
        knows, proposed = drafter.knows(rows), drafter.propose(rows, 6)
        for row, knows_it, tokens in zip(known, knows, proposed, strict=True):
            expected = followed_by(known[row], sizes, 6)
            assert knows_it == (expected is not None)
            assert expected is None or tokens.tolist() == expected
        going = [row for row, (_, answer) in enumerate(answers) if step < len(answer)]
        if going:
            tokens = np.array([answers[row][1][step] for row in going], dtype=np.int32)
            drafter.add(np.array(going, dtype=np.int64), tokens)
            for row, token in zip(going, tokens.tolist(), strict=True):
                known[row].append(token)


def test_a_long_prompt_is_looked_up_in_its_last_part() -> None:
    prompt = np.arange(40_000, dtype=np.int32) % 30_011
    drafter = NgramDrafter(1, 50_000, (4, 2))
    drafter.begin(0, np.append(prompt, prompt[35_000:35_008]))
    assert drafter.propose(np.array([0]), 4)[0].tolist() == prompt[35_008:35_012].tolist()


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2)), min_size=1, max_size=3),
    st.sampled_from(
        [StepCost(0.01, 0, 0.0001), StepCost(0.001, 0, 0.004), StepCost(0.05, 0, 0.002, 1e-5), StepCost(0.0, 0, 0.01)]
    ),
    st.integers(0, 6),
)
def test_a_depth_is_the_best_of_all(rows: list[tuple[float, int]], cost: StepCost, room: int) -> None:
    """In tokens a second of the whole step; where rows hold as much as each other, no depths at all are better."""
    shares, most = np.array([share for share, _ in rows]), np.array([most for _, most in rows], dtype=np.int64)
    held = np.full(len(rows), 100.0)
    base_s = cost.seconds(0, len(rows), float(held.sum()))
    row_s = cost.decode_row_s + cost.held_token_s * 100

    def speed(depths: tuple[int, ...]) -> float:
        tokens = sum(share**offset for share, depth in zip(shares, depths, strict=True) for offset in range(depth + 1))
        return float(tokens) / (base_s + (TURN_S + row_s * sum(depths) if sum(depths) else 0.0))

    found = tuple(worth(shares, most, cost, held, room).tolist())
    assert all(depth <= limit for depth, limit in zip(found, most.tolist(), strict=True)) and sum(found) <= room
    best = max(speed(each) for each in product(*(range(limit + 1) for limit in most.tolist())) if sum(each) <= room)
    assert speed(found) == pytest.approx(best, rel=1e-4)


def test_rows_that_repeat_themselves_get_drafts_and_others_none_however_full_the_batch_is() -> None:
    """One row repeats three tokens, and the other never says the same twice."""
    speculation, cost = Speculation(Drafting(), 4, 200, 64), StepCost(0.02, 0.0, 0.0005)
    speculation.begin(0, np.array([1, 2, 3], dtype=np.int32))
    speculation.begin(1, np.array([1, 2, 3], dtype=np.int32))
    rows, held, most = (np.array(each, dtype=np.int32) for each in ([0, 1], [50, 50], [9, 9]))
    for step in range(30):
        speculation.add(rows, np.array([1 + step % 3, 10 + step], dtype=np.int32))
    depths = speculation.depths(rows, most, cost, held)
    assert depths.tolist() == [2, 0], "there are four rows in all"
    drafts = speculation.draft(rows, depths, held)
    assert drafts.rows.tolist() == [0, 0] and drafts.tokens.tolist() == [1, 2] and drafts.held_tokens == 51 + 52
    assert not speculation.depths(rows, most, StepCost(0.0, 0.0, 0.02), held).any(), "a draft costs as much as a token"
    assert not speculation.depths(rows, most, StepCost(), held).any(), "nobody knows what a row costs"


def test_without_a_cost_a_step_is_explored_now_and_then() -> None:
    speculation = Speculation(Drafting(), 8, 200, 64)
    speculation.begin(0, np.array([1, 2, 1, 2, 1, 2], dtype=np.int32))
    row, held, most = (np.array(each, dtype=np.int32) for each in ([0], [50], [9]))
    drafted = list[int]()
    for call in range(500):
        depths = speculation.depths(row, most, StepCost(), held)
        if depths.any() and call % 3 == 0:  # it is asked more often than steps are planned
            drafted += [call, *depths.tolist()]
            speculation.draft(row, depths, held)
    assert drafted == [9, 4, 27, 4, 60, 4, 126, 4, 255, 4], "it asks less often while that does not pay"


@pytest.mark.parametrize(
    ("config", "algorithm", "count", "model", "expected"),
    [
        ("", "none", 0, "", None),
        ("", "NGRAM", 0, "", Drafting(DRAFTS, LONGEST, SHORTEST)),
        ("", "NGRAM", 3, "", Drafting(3, LONGEST, SHORTEST)),
        ("", "STANDALONE", 3, "small", Drafting(3, model="small")),
        ("", "EAGLE3", 0, "head", Drafting(8, model="head", is_head=True)),
        (
            '{"method": "eagle3", "model": "head", "num_speculative_tokens": 5}',
            "none",
            0,
            "",
            Drafting(5, model="head", is_head=True),
        ),
        ('{"method": "ngram"}', "none", 0, "", Drafting(DRAFTS, LONGEST, SHORTEST)),
        (
            '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 3}',
            "none",
            0,
            "",
            Drafting(5, 3, 3),
        ),
        ('{"method": "draft_model", "model": "small"}', "none", 0, "", Drafting(DRAFTS, model="small")),
        ('{"model": "small", "num_speculative_tokens": 4}', "none", 0, "", Drafting(4, model="small")),
    ],
)
def test_flags_of_vllm_and_of_sglang_ask_for_drafts(
    config: str, algorithm: str, count: int, model: str, expected: Drafting | None
) -> None:
    assert parse_drafting(config, algorithm, count, model) == expected


@pytest.mark.parametrize(
    ("config", "algorithm", "count", "model", "message"),
    [
        ("ngram", "none", 0, "", "must be a JSON object"),
        ("[]", "none", 0, "", "must be a JSON object"),
        ('{"a":' * 20_000, "none", 0, "", "must be a JSON object"),
        ('{"method": "\udcff"}', "none", 0, "", "must be a JSON object"),
        ("{}", "none", 0, "", "an object whose method is one of ngram, draft_model"),
        ('{"method": "ngram", "model": "x"}', "none", 0, "", "an object of method, num_speculative_tokens, prompt"),
        ('{"method": "draft_model", "model": "x", "prompt_lookup_max": 3}', "none", 0, "", "an object of method, num_spec"),
        ('{"method": "draft_model"}', "none", 0, "", "whose model is a folder or a name"),
        ('{"method": "draft_model", "model": 3}', "none", 0, "", "whose model is a folder or a name"),
        ('{"method": "mtp"}', "none", 0, "", "an object whose method is one of ngram, draft_model, eagle3; it is 'mtp'"),
        ('{"method": ["ngram"]}', "none", 0, "", "an object whose method is one of ngram, draft_model"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "none", 0, "", "num_speculative_tokens is between 1 and 32"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "none", 0, "", "num_speculative_tokens is between 1 and 32"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "none", 0, "", "prompt_lookup_min is at most"),
        ('{"method": "ngram"}', "NGRAM", 0, "", "left out with --speculative-algorithm"),
        ("", "NGRAM", 99, "", "from 0 to 32"),
        ("", "NGRAM", 0, "small", "left out without a draft model"),
        ("", "STANDALONE", 0, "", "given with --speculative-algorithm STANDALONE"),
        ("", "EAGLE3", 0, "", "given with --speculative-algorithm EAGLE3"),
        ('{"method": "eagle3"}', "none", 0, "", "an object whose model is a folder"),
        ("", "none", 4, "", "left out without --speculative-algorithm"),
        ("", "none", 0, "small", "left out without --speculative-algorithm"),
    ],
)
def test_what_is_not_there_is_refused_by_name(config: str, algorithm: str, count: int, model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_drafting(config, algorithm, count, model)
