"""The timed executor of a process: a checkpoint's layout and words, without its weights."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from common.config import EngineConfig, ModelConfig, with_step_size
from common.errors import ConfigError
from common.executor import StepPlan
from common.text.tokenizer_manager import TokenizerManager
from engine.model_runner import ModelRunner
from engine.timed import TimedCheckpoint, plain_words

DEMO = Path("demo/model")
SMALL = {"kv_memory": "2MiB", "page_size": 8, "max_running": 4}


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
