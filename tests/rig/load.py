"""Clients of a fleet on threads, each with one request after the other.

Owns the threads, and what came. What is asked, and which answers are errors, is for those who inherit.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from random import Random
from typing import Generic, TypeVar

from tests.rig.pages import until

A = TypeVar("A")
STOP_S = 120.0


class Load(ABC, Generic[A]):
    """Asks from its making on, until it is told to stop."""

    def __init__(self, streams: int, seed: int) -> None:
        self.answers: list[A] = []
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(Random(seed + number),)) for number in range(streams)]
        for thread in self._threads:
            thread.start()

    @abstractmethod
    def ask(self, random: Random) -> Iterator[None]:
        """One client: it yields after each request, and notes what came."""

    def wait_for_another_answer(self) -> None:
        answered = len(self.answers)
        until(lambda: len(self.answers) > answered or self.errors, "another answer")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(STOP_S)

    def _run(self, random: Random) -> None:
        for _ in self.ask(random):
            if self._stop.is_set():
                return
