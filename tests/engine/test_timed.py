"""The timed executor, alone and in place of a checkpoint's model."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from common.config import EngineConfig, ModelConfig, with_step_size
from common.errors import ConfigError
from common.executor import Chunk, RowStart, StepPlan
from common.ids import Int32Array
from common.messages import TokenLogprob
from common.sampling_params import SamplingParams
from common.step_cost import StepCost
from common.text.tokenizer_manager import TokenizerManager
from engine.model_runner import ModelRunner
from engine.timed import Pace, TimedCheckpoint, TimedExecutor, plain_words
from tests.builders import HandClock, engine

DEMO = Path("demo/model")
SMALL = {"kv_memory": "2MiB", "page_size": 8, "max_running": 4}
COST = StepCost(step_s=1.0, chunk_token_s=0.1, decode_row_s=0.01)


def plan(chunk_tokens: int, decode_rows: int) -> StepPlan:
    rows = np.arange(1, 1 + decode_rows, dtype=np.int32)
    return StepPlan(1, chunks=(Chunk(0, 0, np.zeros(chunk_tokens, dtype=np.int32), last=True),), decode_rows=rows)


def test_a_step_takes_what_its_tokens_and_rows_cost() -> None:
    clock = HandClock(100.0)
    step = TimedExecutor(engine(), Pace(COST, clock), words=[12]).launch(plan(5, 3))
    assert step.ends_s == pytest.approx(101.53)
    clock.now_s = 101.52
    assert step.poll() is None
    clock.now_s = 101.54
    result = step.poll()
    assert result is not None
    assert result.tokens.tolist() == [12, 12, 12, 12]
    assert COST.seconds(5, 3) == pytest.approx(1.53)


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_decode_steps_grow_with_the_tokens_that_their_rows_hold(steps: int) -> None:
    cost, rows, held = StepCost(1.0, 0.1, 0.01, 0.001), np.arange(3, dtype=np.int32), 600
    one_by_one, at_once = (TimedExecutor(engine(), Pace(cost, HandClock())) for _ in range(2))
    plans = [StepPlan(number, decode_rows=rows, held_tokens=held + 3 * number) for number in range(steps + 1)]
    ends_s = [one_by_one.launch(plan).ends_s for plan in plans]
    assert ends_s[0] == at_once.launch(plans[0]).ends_s == pytest.approx(1.63)
    assert at_once._pace.repeat(rows, steps, held) == pytest.approx(ends_s[-1] - ends_s[0])
    assert at_once._pace.repeat(rows, -steps, plans[-1].held_tokens) == pytest.approx(ends_s[0] - ends_s[-1])


def test_a_step_begins_when_the_one_before_has_ended_or_when_it_is_launched() -> None:
    clock = HandClock(100.0)
    executor = TimedExecutor(engine(), Pace(COST, clock))
    first, second = executor.launch(plan(10, 0)), executor.launch(plan(20, 0))
    assert (first.ends_s, second.ends_s) == pytest.approx((102.0, 105.0))
    clock.now_s = 200.0
    assert executor.launch(plan(10, 0)).ends_s == pytest.approx(202.0)


def test_it_is_sure_of_its_words_and_of_the_prompts_of_rows_that_ask() -> None:
    executor = TimedExecutor(engine(), Pace(COST, HandClock(1e9)), words=[12])
    pages = np.zeros(1, dtype=np.int32)
    plain = SamplingParams(max_new_tokens=4)
    asks = replace(plain, logprobs=3), replace(plain, prompt_logprobs=0), plain
    starts = tuple(RowStart(row, pages, sampling) for row, sampling in enumerate(asks))
    prompt = np.array([5, 6, 7], dtype=np.int32)
    first = executor.launch(
        StepPlan(1, starts=starts, chunks=tuple(Chunk(row, 0, prompt, last=False) for row in range(3)))
    ).result
    last = executor.launch(StepPlan(2, chunks=tuple(Chunk(row, 3, prompt, last=True) for row in range(3)))).result
    assert first.logprobs.by_row() == {}
    assert last.logprobs.by_row() == {0: (TokenLogprob(12, 0.0, 1),)}
    told = [result.prompt_logprobs.by_row()[1] for result in (first, last)]
    assert told == [tuple(TokenLogprob(token, 0.0, 1) for token in ids) for ids in ((6, 7), (5, 6, 7))]


def test_an_answer_does_not_depend_on_how_much_of_its_prompt_was_cached() -> None:
    executor = TimedExecutor(engine(), Pace(COST, HandClock(1e9)), words=range(12, 99))
    prompt, pages = np.arange(40, dtype=np.int32), np.zeros(1, dtype=np.int32)
    tokens: set[int] = set()
    for there in (0, 16, 32):
        start = RowStart(0, pages, SamplingParams(max_new_tokens=4, seed=5), length=there)
        plan = StepPlan(1, (start,), (Chunk(0, there, prompt[there:], last=True),))
        tokens.update(executor.launch(plan).result.tokens.tolist())
    assert len(tokens) == 1


def test_an_embedding_is_one_zero_and_comes_with_its_prompt() -> None:
    executor = TimedExecutor(engine(), Pace(COST, HandClock(1e9)))
    start = RowStart(0, np.zeros(1, dtype=np.int32), SamplingParams(max_new_tokens=1, pooling="last"))
    chunks = [Chunk(0, at, np.zeros(3, dtype=np.int32), last=at == 3) for at in (0, 3)]
    plans = StepPlan(1, starts=(start,), chunks=(chunks[0],)), StepPlan(2, chunks=(chunks[1],))
    assert [executor.launch(one).result.embeddings for one in plans] == [{}, {0: bytes(4)}]
    plain = RowStart(0, start.pages, SamplingParams(max_new_tokens=1))
    after = StepPlan(3, starts=(plain,), chunks=(Chunk(0, 0, np.zeros(3, dtype=np.int32), last=True),))
    assert executor.launch(after).result.embeddings == {}, "the next request in the row asks for none"


def test_growing_rows_costs_nothing_and_all_pages_are_equal() -> None:
    executor = TimedExecutor(engine(), Pace(COST, HandClock(100.0)))
    rows = np.arange(3, dtype=np.int32)
    assert executor.launch(StepPlan(1, decode_rows=rows, grown_rows=rows, grown_pages=rows)).ends_s == pytest.approx(101.03)
    assert executor.digest_pages(rows) == bytes(12)


def test_a_token_depends_on_seed_and_position_so_an_answer_that_is_resumed_in_another_row_goes_on() -> None:
    words = [11, 12, 13, 14, 15]

    def answer(prompt: int, tokens: int, row: int, seed: int, decodes_only: bool = False) -> list[int]:
        executor = TimedExecutor(engine(), Pace(COST, HandClock(1e9)), words)
        sampling = SamplingParams(max_new_tokens=tokens, seed=seed)
        alone, found = np.array([row], dtype=np.int32), list[int]()
        held = np.zeros(1, dtype=np.int32)

        def run(plan: StepPlan) -> Int32Array:
            step = executor.launch(plan)
            return step.result.tokens

        if decodes_only:
            run(StepPlan(1, starts=(RowStart(row, held, sampling, prompt - 1, last_token=99),)))
        else:
            first = Chunk(row, 0, np.zeros(prompt - 1, dtype=np.int32), last=False)
            last = Chunk(row, prompt - 1, np.zeros(1, dtype=np.int32), last=True)
            assert not len(run(StepPlan(1, starts=(RowStart(row, held, sampling),), chunks=(first,))))
            found += run(StepPlan(2, chunks=(last,))).tolist()
        while len(found) < tokens:
            found += run(StepPlan(3, decode_rows=alone)).tolist()
        return found

    whole = answer(prompt=6, tokens=8, row=0, seed=2**62)
    assert set(whole) == set(words)
    assert answer(prompt=9, tokens=5, row=2, seed=2**62) == whole[3:], "computed anew from the third token on"
    assert answer(prompt=9, tokens=5, row=3, seed=2**62, decodes_only=True) == whole[3:], "handed over with its KV"
    assert answer(prompt=6, tokens=8, row=0, seed=2**62 + 1) == [*whole[1:], answer(6, 9, 0, 2**62)[-1]]


def timed(wake: threading.Event, **fields: object) -> TimedCheckpoint:
    engine = EngineConfig(executor="timed", **SMALL | fields)  # type: ignore[arg-type]
    return TimedCheckpoint(ModelConfig(), with_step_size(engine, "cpu"), wake.set, lambda text: None)


def test_it_is_described_as_the_real_one_but_belongs_to_another_fleet() -> None:
    real = ModelRunner(ModelConfig(), EngineConfig(device="cpu", **SMALL), lambda text: None).description  # type: ignore[arg-type]
    executor = timed(threading.Event())
    described = executor.description
    executor.close()
    assert described.model.fingerprint != real.model.fingerprint
    for name in ("layout", "total_pages", "max_rows", "eos_token_ids", "device"):
        assert getattr(described, name) == getattr(real, name), name
    for name in ("name", "architecture", "dtype", "vocab_size", "context_tokens"):
        assert getattr(described.model, name) == getattr(real.model, name), name
    assert described.memory.region_bytes == real.memory.region_bytes


def test_its_loop_is_woken_when_a_step_ends() -> None:
    woken = threading.Event()
    executor = timed(woken, step_cost="0.005,0,0")
    step = executor.launch(StepPlan(1, decode_rows=np.arange(3, dtype=np.int32)))
    assert step.poll() is None
    assert woken.wait(60.0)
    result = step.poll()
    executor.close()
    assert result is not None and len(result.tokens) == 3


def test_every_word_of_an_answer_is_text_by_itself_and_none_ends_it() -> None:
    words = plain_words(DEMO, vocab_size=2000, eos_token_ids=(9,))
    assert len(words) > 100 and max(words) < 2000 and 9 not in words
    backend = TokenizerManager("demo").backend
    assert all(backend.decode([word]).strip().isalpha() for word in words[::20])


def test_a_tokenizer_without_words_is_refused(tmp_path: Path) -> None:
    for written, why in (('{"model": {"vocab": {"a": 1, "<s>": 2}}}', "no words"), ('{"model": 3}', "not in the tokenizers")):
        (tmp_path / "tokenizer.json").write_text(written)
        with pytest.raises(ConfigError, match=why):
            plain_words(tmp_path, 100, ())


def test_pages_are_memory_that_a_checksum_reads() -> None:
    executor = timed(threading.Event())
    executor.close()
    pages = np.arange(3, dtype=np.int32)
    before = executor.digest_pages(pages)
    executor.pages[1, -1] = 1
    after = executor.digest_pages(pages)
    assert before[:4] == before[4:8] == after[:4] and after[4:8] != before[4:8]


def test_it_needs_no_torch() -> None:
    code = "import sys, launch.instance_process, engine.timed; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
