"""Rows with real grammars on a leader and its followers: every rank allows the same tokens until the request has ended."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from common.errors import TandemError
from common.executor import RowStart, StepPlan, StepResult, Work
from common.sampling_params import Grammar, SamplingParams
from engine.grammar import masks as grammar_rows
from engine.grammar.grammars import Grammars
from engine.grammar.masks import GrammarProcessor
from engine.ports import SampledRows
from tests.common.instance.ranks.rig import RanksOf
from tests.common.instance.rig import StaticExecutor
from tests.engine.grammar.judge import COMPILER, EOS, TOKENS, VOCAB
from tests.engine.grammar.test_masks import text

NO_PAGES = np.empty(0, dtype=np.int32)
WORDS = "[a-z]{3,8}( [a-z]{3,8}){3,5}"


class DoneStep:
    """A step that was complete when it was launched."""

    ends_s: float | None = None
    layers_done = progress = 0

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def poll(self) -> StepResult:
        return self._result


class GrammarExecutor(StaticExecutor):
    """A rank whose logits are random, the same on every rank, and whose grammars are xgrammar's."""

    def __init__(self) -> None:
        self.grammars = Grammars(lambda: TOKENS, lambda _: COMPILER)
        self.processor = GrammarProcessor(self.grammars.compiled, 8, VOCAB, (EOS,), torch.device("cpu"))

    def launch(self, plan: StepPlan) -> DoneStep:
        if plan.starts:
            self.processor.start(plan.starts)
        rows = plan.sampled_rows
        logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(plan.step))
        at = np.flatnonzero(self.processor.concerns[rows])
        host = rows[at].astype(np.int64)
        concerned = SampledRows(host, torch.from_numpy(host), at, torch.from_numpy(at))
        if len(at):
            self.processor.apply(logits, concerned)
        tokens = logits.argmax(dim=-1)
        if len(at):
            self.processor.sampled(concerned, tokens[concerned.at])
        return DoneStep(StepResult(plan, tokens.numpy().astype(np.int32), failed=concerned.failed))

    def prepare(self, grammar: Grammar, owner: str = "") -> Work:
        soon = self.grammars.prepare(grammar, lambda: None, owner)
        soon.wait()
        return soon

    def close(self) -> None:
        self.grammars.close()


class Leader:
    """Steps of a leader with followers, one by one. answers: of each row. failed: rows whose answers cannot go on."""

    def __init__(self, followers: int) -> None:
        self.rig = RanksOf(GrammarExecutor, *[0.0] * followers)
        self.answers: dict[int, list[int]] = {}
        self.failed: dict[int, TandemError] = {}
        self._step = 0

    def begins(self, row: int, grammar: Grammar | None) -> RowStart:
        if grammar is not None:
            preparation = self.rig.executor.prepare(grammar)
            self.rig.turn()
            assert preparation.poll()
        self.answers[row] = []
        sampling = SamplingParams(max_new_tokens=64, grammar=grammar)
        return RowStart(row, NO_PAGES, sampling, token_ids=np.array([7, 8], dtype=np.int32))

    def step(self, rows: Sequence[int], starts: Sequence[RowStart] = ()) -> None:
        """Raises RankLost when ranks differ."""
        self._step += 1
        plan = StepPlan(self._step, starts=tuple(starts), decode_rows=np.array(rows, dtype=np.int32))
        handle = self.rig.executor.launch(plan)
        self.rig.turn()
        result = handle.poll()
        assert result is not None
        for row, token in zip(rows, result.tokens.tolist(), strict=True):
            self.answers[row].append(token)
        self.failed |= result.failed

    def close(self) -> None:
        for executor in (self.rig.own, *self.rig.executors):
            executor.close()


def test_a_request_with_a_grammar_goes_on_when_others_start_beside_it() -> None:
    leader, words = Leader(followers=2), Grammar("regex", WORDS)
    leader.step([3], [leader.begins(3, words)])
    for row, grammar in ((4, None), (5, Grammar("regex", "[0-9]+")), (6, None)):
        leader.step([3, row], [leader.begins(row, grammar)])
    while EOS not in leader.answers[3]:
        leader.step([3, 5])
    assert re.fullmatch(WORDS, text(leader.answers[3]))
    leader.close()


def test_of_two_requests_with_equal_grammars_one_goes_on_when_the_other_ends() -> None:
    leader = Leader(followers=1)
    first, second = Grammar("regex", WORDS), Grammar("regex", WORDS)
    leader.step([0, 1], [leader.begins(0, first), leader.begins(1, second)])
    leader.step([0, 1])
    del first
    for row in (2, 3):
        leader.step([1, row], [leader.begins(row, None)])
    (loop,) = leader.rig.loops
    assert list(loop._grammars.values()) == [second], "the follower holds the one that goes on"
    while EOS not in leader.answers[1]:
        leader.step([1])
    assert re.fullmatch(WORDS, text(leader.answers[1]))
    leader.close()


def test_a_grammar_that_takes_too_much_work_fails_its_row_on_every_rank_at_the_same_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_rows, "MAX_WORK", 2**11)
    leader, words = Leader(followers=2), Grammar("regex", WORDS)
    ambiguous = Grammar("regex", "((.*a.*){3}b.*){5}")
    leader.step([0, 1], [leader.begins(0, ambiguous), leader.begins(1, words)])
    for _ in range(12):
        leader.step([0, 1])
    assert set(leader.failed) == {0} and EOS not in leader.answers[1][:3]
    leader.close()


def test_a_follower_on_which_a_token_took_seconds_does_as_the_leader_says() -> None:
    leader, words = Leader(followers=1), Grammar("regex", WORDS)
    leader.step([0], [leader.begins(0, words)])
    (follower,) = leader.rig.executors
    assert isinstance(follower, GrammarExecutor)
    follower.processor._rows[0].slowest_s = 2 * grammar_rows.SLOW_S
    while EOS not in leader.answers[0]:
        leader.step([0])
    assert not leader.failed and re.fullmatch(WORDS, text(leader.answers[0]))
    leader.close()
