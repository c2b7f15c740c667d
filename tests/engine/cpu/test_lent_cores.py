"""Idle instances lend their cores, and take them back when they compute."""

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config import EngineConfig, ModelConfig
from common.errors import ConfigError
from common.executor import StepPlan, StepResult
from engine.cpu import lent_cores
from engine.cpu.lent_cores import COMPUTING, GRACE_NS, LOOK_AGAIN_NS, SLOT_BYTES, TAKE_AGAIN_NS, LentCores, make_file
from engine.torch_executor import TorchExecutor
from tests.engine.checkpoints import llama, saved
from tests.engine.driver import Driver
from tests.engine.exact import GREEDY
from tests.engine.packed import CAN_RECORD, pack_everything

PROMPTS = [np.arange(10, 10 + length, dtype=np.int32) for length in (5, 20)]


class Clock:
    now_ns = 10**9

    def __call__(self) -> int:
        return self.now_ns


def program(path: Path, threads: int) -> str:
    """The program of another process, which takes a slot and waits: locks of one process do not exclude each other."""
    return (
        f"import sys; from engine.cpu.lent_cores import LentCores; "
        f"held = LentCores({str(path)!r}, {threads}); print('ready', flush=True); "
        f"[getattr(held, line.strip())() or print('done', flush=True) for line in sys.stdin]"
    )


class Other:
    """An instance in another process."""

    def __init__(self, path: Path, threads: int, inherited: tuple[int, ...] = ()) -> None:
        command = [sys.executable, "-c", program(path, threads)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=inherited)
        self._expect("ready\n")

    def tell(self, word: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{word}\n")
        self._child.stdin.flush()
        self._expect("done\n")

    def kill(self) -> None:
        self._child.kill()
        self._child.communicate()

    def _expect(self, word: str) -> None:
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == word


class Host:
    """The instances of a host, which lend each other cores: one in this process, and others."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, Clock()
        self._first: LentCores | None = None
        self._others: list[Other] = []

    def first(self, threads: int, slots: int) -> LentCores:
        """The one in this process. slots: of all that may run."""
        self.path.write_bytes(bytes(slots * SLOT_BYTES))
        self._first = LentCores(str(self.path), threads, self.clock)
        return self._first

    def other(self, threads: int) -> Other:
        self._others.append(Other(self.path, threads))
        return self._others[-1]

    def close(self) -> None:
        for other in self._others:
            other.kill()
        if self._first is not None:
            self._first.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path / "cores")
    yield found
    found.close()


def test_cores_go_where_the_work_is_and_come_back(host: Host) -> None:
    mine, other = host.first(1, slots=2), host.other(3)
    mine.begin()
    assert mine.threads() == 4, "the other one has computed nothing yet"
    other.tell("begin")
    assert mine.threads() == 1
    other.tell("end")
    host.clock.now_ns = 0
    assert mine.threads() == 1, "its next step may follow at once"
    host.clock.now_ns = time.monotonic_ns() + GRACE_NS
    assert mine.threads() == 4


def test_those_who_compute_share_what_is_lent(host: Host) -> None:
    mine, busy, _ = host.first(2, slots=3), host.other(2), host.other(4)
    mine.begin()
    busy.tell("begin")
    assert mine.threads() == 2 + 4 // 2


def test_the_cores_of_a_process_that_died_while_it_computed_are_free_and_its_successor_takes_its_slot(host: Host) -> None:
    mine, dead, busy = host.first(1, slots=3), host.other(2), host.other(4)
    mine.begin()
    dead.tell("begin")
    busy.tell("begin")
    dead.kill()
    assert mine.threads() == 1, "nobody has looked yet"
    host.clock.now_ns += LOOK_AGAIN_NS
    mine.begin()
    assert mine.threads() == 1 + 2 // 2, "one of the two others lives and computes"
    host.other(2).tell("begin")
    host.clock.now_ns += LOOK_AGAIN_NS
    mine.begin()
    assert mine.threads() == 1, "a successor that lives is not taken for dead"


def test_within_a_step_cores_are_taken_at_most_once_a_millisecond_and_given_back_at_once(host: Host) -> None:
    mine = host.first(1, slots=2)
    seen = []
    write_second_slot(host.path, 2, COMPUTING)
    mine.begin()
    for state, after_ns in ((COMPUTING, 0), (0, 0), (COMPUTING, 1), (0, 1), (0, TAKE_AGAIN_NS), (COMPUTING, 1)):
        write_second_slot(host.path, 2, state)
        host.clock.now_ns += after_ns
        seen.append(mine.threads())
    mine.end()
    write_second_slot(host.path, 2, 0)
    mine.begin()
    seen.append(mine.threads())
    assert seen == [1, 3, 1, 1, 3, 1, 3]


def test_one_that_is_drained_leaves_its_cores_to_the_others(host: Host) -> None:
    mine, drained = host.first(1, slots=2), host.other(2)
    mine.begin()
    drained.tell("begin")
    drained.tell("close")
    assert mine.threads() == 3


def test_a_file_that_is_not_there_is_refused_by_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lent-cores .* cannot be used"):
        LentCores(str(tmp_path / "none"), 1)


def test_the_file_of_a_fleet_has_no_name_and_those_who_inherit_it_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = make_file(2)
    path, clock = Path(f"/dev/fd/{file}"), Clock()
    mine, other = LentCores(str(path), 1, clock), Other(path, 3, (file,))
    try:
        assert list(tmp_path.iterdir()) == [], "nothing is left of it, whoever is killed"
        mine.begin()
        other.tell("begin")
        assert mine.threads() == 1
        other.kill()
        other = Other(path, 3, (file,))
        assert mine.threads() == 4, "its successor has the slot, and has not computed yet"
    finally:
        other.kill()
        mine.close()
        os.close(file)


@pytest.mark.parametrize("records", [False, True])
def test_the_threads_of_a_step_follow_what_is_lent_and_its_answers_do_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: bool
) -> None:
    """A lender begins to compute in the middle of a step: it gets its core back at the next layer."""
    if records:
        if not CAN_RECORD:
            pytest.skip("there is no C compiler")
        pack_everything(monkeypatch)
    path = tmp_path / "cores"
    path.write_bytes(bytes(2 * SLOT_BYTES))
    set_to: list[int] = []
    monkeypatch.setattr(lent_cores, "LOOK_AGAIN_NS", 2**60)  # the second slot belongs to no process

    def set_threads(threads: int) -> None:
        set_to.append(threads)
        if threads == 3:
            write_second_slot(path, 2, COMPUTING)

    model = saved(llama(), tmp_path / "model")
    config = EngineConfig(device="cpu", page_size=8, kv_memory="2MiB", max_running=8, threads=1)
    answers = []
    for file in ("", str(path)):
        executor = TorchExecutor(ModelConfig(model=str(model)), replace(config, lent_cores=file), lambda: None, lambda text: None)
        if file:
            write_second_slot(path, 2, 0)
            monkeypatch.setattr(torch, "set_num_threads", set_threads)
        try:
            answers.append(Driver(partial(finished, executor), executor.description).answers(PROMPTS, 5, GREEDY))
        finally:
            executor.close()
    assert answers[0] == answers[1]
    assert set_to == [3, 1]


def write_second_slot(path: Path, threads: int, state: int) -> None:
    """As its owner would."""
    with path.open("r+b") as file:
        file.seek(SLOT_BYTES)
        file.write(struct.pack("qq", threads, state))


def finished(executor: TorchExecutor, plan: StepPlan) -> StepResult:
    handle = executor.launch(plan)
    until = time.monotonic() + 60
    while (result := handle.poll()) is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return result
